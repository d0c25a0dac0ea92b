import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.desk import token_bar
from eyas.desk.params import Params, read_params
from eyas.desk.workers import alongside
from eyas.drafter.packing import number_replies, predictions
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.stages import extract
from eyas.states import capture_hf, shards, store
from eyas.states.layout import Captured
from eyas.states.target import load_head

LENGTHS = (9, 30, 4, 17, 12, 25, 8)
RUNTIME = read_params().value("runtime") | {"tracking": "off", "threads": 1}


CHOICES: dict[str, dict[str, Any]] = {
    "bf16": {"final_rows": "supervised"},
    "fp8": {"codec": "fp8", "final_codec": "fp8", "final_rows": "supervised"},
    "int4": {"codec": "int4", "final_codec": "fp8", "final_rows": "supervised"},
    "teacher": {"final_rows": "supervised", "teacher_k": 97, "final_every": 3},
}


def params(workers: int = 1, **changes: Any) -> Params:
    settings = {"backend": "transformers", "layers": None, "codec": "bf16"}
    settings |= {"shard_tokens": 40, "batch_tokens": 30, **changes}
    extracting = RUNTIME["extract"] | {"workers": workers}
    return Params({"extract": settings, "runtime": RUNTIME | {"extract": extracting}})


def sample(number: int, length: int) -> Sample:
    ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(number))
    return Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(ids.tolist()),
        spans=((length // 2, length),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=None,
    )


@pytest.fixture
def home(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a random target and a mixture of 6 + 1 samples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/target").mkdir(parents=True)
    for path in llama_folder.iterdir():
        (tmp_path / "models/target" / path.name).symlink_to(path)
    about = {"name": "random", "codec": "chatml", "revision": "r0", "source": {}}
    write_json(tmp_path / "models/target/eyas_target.json", about)
    samples = [sample(n, length) for n, length in enumerate(LENGTHS)]
    (tmp_path / "data/mixture").mkdir(parents=True)
    write_samples(tmp_path / "data/mixture/train.parquet", samples[:6])
    write_samples(tmp_path / "data/mixture/val.parquet", samples[6:])
    return tmp_path


def contents(home: Path) -> dict[str, bytes]:
    files = [*home.glob("var/states/*/*"), home / extract.MANIFEST]
    return {str(path.relative_to(home)): path.read_bytes() for path in files}


def test_every_sample_gets_its_states_and_the_rows_add_up(home: Path, llama: Any) -> None:
    report = extract.work(params())
    assert report.metrics["rows_in"] == report.metrics["rows_out"] == 7
    assert report.metrics["tokens"] == sum(LENGTHS)
    assert report.metrics["shards_written"] == 3
    assert report.metrics["teacher_argmax_agreement"] >= 0.97
    reader = store.open_store(home / extract.MANIFEST, home / "var/states")
    assert reader.meta.layers == (1, 3, 4)
    assert (reader.meta.final, reader.meta.target_revision) == ("post_norm", "r0")
    assert reader.ids_of("val") == ("s6",)
    for number, length in enumerate(LENGTHS):
        states = reader.read(f"s{number}")
        ids = sample(number, length).input_ids
        reported = llama(torch.tensor([ids]), output_hidden_states=True).hidden_states
        assert tuple(states.input_ids.tolist()) == ids
        # half a unit in the last of bf16's 8 bits, and float32 sums in another order
        bound = {"rtol": 2**-8, "atol": 1e-4}
        torch.testing.assert_close(states.aux_TLD[:, 1], reported[4][0], **bound)
        torch.testing.assert_close(states.final_TD, reported[-1][0], **bound)


@pytest.mark.parametrize("choice", CHOICES)
def test_each_codec_keeps_the_states_within_its_error(home: Path, choice: str) -> None:
    extract.work(params())
    exact = store.open_store(home / extract.MANIFEST, home / "var/states")
    report = extract.work(params(**CHOICES[choice]))
    assert report.metrics["teacher_argmax_agreement"] >= 0.9
    assert store.verify(home / extract.MANIFEST, home / "var/states") == []
    coded = store.open_store(home / extract.MANIFEST, home / "var/states")
    head_VD = load_head(home / "models/target").lm_head_VD
    limit = {"bf16": 0.0, "fp8": 0.03, "int4": 0.12}[coded.meta.codec.split("/")[0]]
    for name in exact.samples:
        want, got = exact.read(name), coded.read(name)
        error_TL = (got.aux_TLD - want.aux_TLD).norm(dim=-1) / want.aux_TLD.norm(dim=-1)
        assert float(error_TL.mean()) <= limit
        rows = predictions(
            number_replies(len(got.input_ids), coded.entries[name].spans, truncated=False)
        )
        error_R = (got.final_TD - want.final_TD).norm(dim=-1) / want.final_TD.norm(dim=-1)
        every = coded.meta.final_every
        kept = rows[rows % every == 0]
        assert not len(kept) or float(error_R[kept].mean()) <= 0.03
        assert got.final_TD.isnan().all(1).sum() == len(got.input_ids) - len(kept)
        if coded.meta.teacher_k:  # the store that it is held against has bf16 states
            own = torch.nn.functional.linear(want.final_TD[rows], head_VD).softmax(-1)
            assert got.top_T2K is not None
            ids, shares = got.top_T2K[rows, 0].long(), got.top_T2K[rows, 1].exp()
            torch.testing.assert_close(own.gather(1, ids), shares, rtol=2**-5, atol=0)
            assert torch.allclose(shares.sum(1), torch.ones(len(rows)))


@pytest.mark.parametrize("choice", ["default", *CHOICES])
def test_a_run_killed_in_the_middle_goes_on_and_ends_with_the_same_bytes(
    home: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    settings = params(**CHOICES.get(choice, {}))
    extract.work(settings)
    whole = contents(home)
    for name in whole:
        (home / name).unlink()
    true_capture, calls = capture_hf.capture, 0

    def dying(*arguments: Any) -> list[Captured]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return true_capture(*arguments)

    monkeypatch.setattr(capture_hf, "capture", dying)
    with pytest.raises(KeyboardInterrupt):
        extract.work(settings)
    kept = len(list(home.glob("var/states/*/*.json")))
    assert 0 < kept < 3
    assert not (home / extract.MANIFEST).exists()
    report = extract.work(settings)
    assert report.metrics["shards_reused"] == kept
    assert contents(home) == whole


@pytest.mark.slow
def test_two_workers_make_the_bytes_that_one_makes(home: Path) -> None:
    extract.work(params())
    whole = contents(home)
    for name in whole:
        (home / name).unlink()
    report = extract.work(params(workers=2))
    assert report.metrics["shards_written"] == 3
    assert 0 < report.metrics["compute_share"] < 1
    assert contents(home) == whole


@pytest.mark.slow
def test_two_runs_over_one_store_share_its_shards(home: Path) -> None:
    extract.work(params())
    whole = contents(home)
    for name in whole:
        (home / name).unlink()
    reports = alongside(extract.work, [(params(),), (params(),)], lambda: None)
    assert [report.metrics["rows_out"] for report in reports] == [7, 7]
    assert contents(home) == whole


def test_a_disk_that_fills_while_running_is_told_before_the_next_shard(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0

    def check_space(_folder: Path, _needed_bytes: int) -> None:
        nonlocal checks
        checks += 1
        if checks == 4:  # once for all of them, then for each
            raise EyasError("0.00 GB free")

    monkeypatch.setattr(shards, "check_space", check_space)
    with pytest.raises(EyasError, match="GB free"):
        extract.work(params())
    assert len(list(home.glob("var/states/*/shard-*.json"))) == 2


def test_an_altered_shard_is_made_again_and_named(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extract.work(params())
    whole = contents(home)
    victim = next(home.glob("var/states/*/shard-00002.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    report = extract.work(params())
    assert (report.metrics["shards_written"], report.metrics["shards_reused"]) == (1, 2)
    assert "shard-00002.safetensors: expected sha256" in caplog.text
    assert contents(home) == whole


def test_another_setting_gets_a_folder_of_its_own_and_a_revert_costs_nothing(home: Path) -> None:
    extract.work(params())
    extract.work(params(layers=[1, 2, 5]))
    assert len(list((home / "var/states").iterdir())) == 2
    assert extract.work(params()).metrics["shards_written"] == 0


@pytest.mark.parametrize("choice", ["bf16", "teacher"])
def test_states_that_do_not_feed_lm_head_stop_the_run_after_one_shard(
    home: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    true_capture = capture_hf.capture

    def shifted(*arguments: Any) -> list[Captured]:
        rows = true_capture(*arguments)
        return [Captured(aux_TLD=r.aux_TLD, final_TD=r.aux_TLD[:, 2]) for r in rows]

    monkeypatch.setattr(capture_hf, "capture", shifted)
    with pytest.raises(EyasError, match="predict the target's own next token in"):
        extract.work(params(**CHOICES[choice]))
    assert len(list(home.glob("var/states/*/*.safetensors"))) == 1


def test_a_line_of_progress_is_logged_where_there_is_no_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_bar, "_LOG_EVERY_S", 0.0)
    with caplog.at_level("INFO", "eyas"):
        extract.work(params())
    assert "105 of 105 tokens" in caplog.text


def test_a_terminal_gets_a_bar(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    extract.work(params())
    assert "extract" in capsys.readouterr().err
    with token_bar.token_bar("train", 10, "captures window 1 of 2") as advance:
        advance(10)
    assert not capsys.readouterr().err, "the bar of training is there"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_codec": "int4"}, r"extract.final_codec: expected fp32 \| bf16 \| fp8, got 'int4'"),
        ({"final_rows": "few"}, r"extract.final_rows: expected all \| supervised, got 'few'"),
        ({"backend": "vllm"}, r"extract.backend: expected transformers \| sglang, got 'vllm'"),
        ({"backend": "sglang"}, r"runtime.extract.servers: expected addresses .*, got none"),
        ({"codec": "zip"}, r"extract.codec: expected fp32 \| bf16 \| fp8 \| int4, got 'zip'"),
        ({"layers": [2, 4]}, r"extract.layers: .*first 1.* got \[2, 4\]"),
        ({"layers": [1, 7]}, r"last <= 6"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    home: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EyasError, match=message):
        extract.work(params(**changes))


def test_an_empty_mixture_a_long_sample_and_a_repeated_id_are_refused(home: Path) -> None:
    train = home / "data/mixture/train.parquet"
    write_samples(train, [sample(0, 1100)])
    with pytest.raises(EyasError, match="s0 has 1100 tokens, expected 1 to 1024"):
        extract.work(params())
    write_samples(train, [sample(0, 4), sample(0, 4)])
    with pytest.raises(EyasError, match="ids repeat"):
        extract.work(params())
    write_samples(train, [])
    write_samples(home / "data/mixture/val.parquet", [])
    with pytest.raises(EyasError, match="no samples"):
        extract.work(params())


def test_a_first_shard_without_a_supervised_row_leaves_nothing_to_compare(home: Path) -> None:
    bare = [dataclasses.replace(sample(n, 20), spans=()) for n in range(3)]
    write_samples(home / "data/mixture/train.parquet", bare)
    report = extract.work(params(**CHOICES["fp8"]))
    assert report.metrics["teacher_argmax_agreement"] == 1.0


def test_states_that_are_not_finite_stop_the_run_and_name_the_sample(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_capture = capture_hf.capture

    def broken(*arguments: Any) -> list[Captured]:
        rows = true_capture(*arguments)
        with torch.inference_mode():
            rows[0].aux_TLD[0, 1] = torch.nan
        return rows

    monkeypatch.setattr(capture_hf, "capture", broken)
    with pytest.raises(EyasError, match=r"sample s\d: aux states: expected finite .* got nan"):
        extract.work(params())
    assert list(home.glob("var/states/*/*.safetensors")) == []


def test_the_manifest_names_no_machine_and_no_time(home: Path) -> None:
    extract.work(params())
    assert str(home) not in (home / extract.MANIFEST).read_text(encoding="utf-8")
    assert set(read_json(home / extract.MANIFEST)) == {"format", "meta", "samples", "shards"}
