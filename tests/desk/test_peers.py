"""`eyas store export` and `import`, from the project's folder."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from eyas import cli
from eyas.desk.params import compose
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_text
from eyas.records import Sample
from eyas.settings import Extract
from eyas.states import shards
from eyas.states.capture_hf import capture
from eyas.states.job import Job, build_manifest
from eyas.states.layout import make_layout
from eyas.states.store import open_store, write_manifest

ABOUT = {"name": "random", "revision": "r0", "codec": "chatml"}
IDS = [[(5 * i + n) % 97 for i in range(length)] for n, length in enumerate((20, 11, 14))]


@pytest.fixture
def home(
    llama_folder: Path, llama: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Stand where a target lies and a store of its real states."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "models/target"
    target.mkdir(parents=True)
    for path in llama_folder.iterdir():
        (target / path.name).symlink_to(path)
    write_json(target / "eyas_target.json", ABOUT)
    samples = [
        Sample(
            id=f"s{number}",
            dataset="chat",
            input_ids=ids,
            spans=((3, len(ids)),),
            temperature=0.7,
            provider="local",
            flags=(),
            completion_tokens_billed=None,
        )
        for number, ids in enumerate(IDS)
    ]
    settings = Extract(
        backend="transformers", layers=None, codec="bf16", shard_tokens=64, batch_tokens=64
    )
    job = Job(
        samples=samples,
        splits=["train", "train", "val"],
        runs=[range(3)],
        hidden_size=48,
        model_type="llama",
        dtype="float32",
        layers=(1, 3, 4),
        layout=make_layout("bf16", "bf16", "all"),
        settings=settings,
        folder=tmp_path / "var/states/key",
    )
    job.folder.mkdir(parents=True)
    shards.write_shard(job.path(0), samples, capture(llama, IDS, (1, 3, 4)), job.layout)
    write_manifest(tmp_path / "data/hidden_states/manifest.json", build_manifest(job, ABOUT, [0]))
    write_text(tmp_path / "params.yaml", compose(folder=Path(__file__).parents[2] / "conf"))
    return tmp_path


def eyas(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["store", *words])
    if result.exception:
        raise result.exception
    return result.output


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_states_of_the_target_go_there_and_come_back(home: Path, form: str) -> None:
    assert "there: 3 samples, 45 tokens" in eyas("export", "there", "--form", form)
    told = eyas("import", "there", "--form", form, "--out", "back")
    assert "back: 3 samples, 45 tokens" in told
    ours = open_store(home / "data/hidden_states/manifest.json", home / "var/states")
    back = open_store(home / "back/manifest.json", home / "back")
    assert len(back.ids_of("train")) == 2
    for one, other in zip(ours.samples, back.samples, strict=True):
        a, b = ours.read(one), back.read(other)
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.aux_TLD, b.aux_TLD)
        assert torch.allclose(a.final_TD, b.final_TD, rtol=2**-7, atol=1e-6)
    about = read_json(home / "back/manifest.json")["meta"]
    assert about["layers"] == [1, 3, 4]
    assert (about["target_name"], about["template"]) == ("random", "chatml")


def test_layers_are_those_of_the_parameters(home: Path) -> None:
    eyas("export", "there", "--form", "specforge")
    conf = Path(__file__).parents[2] / "conf"
    write_text(home / "params.yaml", compose(["extract.layers=[1,3]"], folder=conf))
    with pytest.raises(EyasError, match=r"data_0.ckpt: aux_hidden_state: .*\(1, 20, 144\)"):
        eyas("import", "there", "--form", "specforge", "--out", "back")


def test_a_store_of_another_target_is_not_exported(home: Path) -> None:
    write_json(home / "models/target/eyas_target.json", ABOUT | {"revision": "r1"})
    with pytest.raises(EyasError, match="expected states of target r1, got r0"):
        eyas("export", "there", "--form", "speculators")


@pytest.mark.parametrize("words", [("export",), ("import", "there"), ("export", "a", "--out", "b")])
def test_what_a_command_lacks_is_told(home: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(EyasError, match=f"eyas store {words[0]}: expected a FOLDER"):
        eyas(*words)
