"""Bodies, fingerprints and order."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from eyas.generation.jobs import Wish, admission_order, build_body, build_jobs, split_jobs
from eyas.records import Prompt
from eyas.settings import DatasetGenerate, Endpoint, PartitionRule, Prices, Sampling

Make = Callable[[int], list[Prompt]]
WISH = Wish(
    endpoint=Endpoint(name="openrouter", model="m", provider={"only": ["p"]}, prices=None),
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=3),
    generate=DatasetGenerate(budget_tokens=None, samples_per_prompt=2, max_tokens=None),
    partition={
        "short": PartitionRule(max_prompt_tokens=100, max_tokens=64),
        "long": PartitionRule(max_prompt_tokens=None, max_tokens=128),
    },
    target_revision=None,
)
LOCAL = replace(
    WISH,
    endpoint=Endpoint(name="local", model="m", provider={}, prices=Prices(
        prompt_usd_per_mtok=1.0, completion_usd_per_mtok=1.0
    )),
    target_revision="r1",
)  # fmt: skip


def test_the_body_holds_what_the_endpoint_needs_and_no_more(make_prompts: Make) -> None:
    prompt = make_prompts(1)[0]
    body = build_body(prompt, 0, WISH)
    assert list(body) == [
        "model", "messages", "max_tokens", "temperature", "top_p", "seed", "provider", "plugins"
    ]  # fmt: skip
    assert body["plugins"] == [{"id": "context-compression", "enabled": False}]
    assert body["max_tokens"] == 64
    tool = {"type": "function", "function": {"name": "f"}}
    assert build_body(replace(prompt, tools=(tool,)), 0, WISH)["tools"] == [tool]


def test_only_the_local_endpoint_is_asked_for_ids_and_told_the_target(make_prompts: Make) -> None:
    body = build_body(make_prompts(1)[0], 0, LOCAL)
    assert body["return_token_ids"] is True
    assert body["target_revision"] == "r1"
    assert not {"plugins", "provider"} & set(body)


def test_token_texts_are_asked_for_only_where_the_conf_says_so(make_prompts: Make) -> None:
    prompt = make_prompts(1)[0]
    off, on = WISH, replace(WISH, endpoint=replace(WISH.endpoint, logprobs=True))
    assert build_body(prompt, 0, on) == build_body(prompt, 0, off) | {"logprobs": True}
    assert "logprobs" not in build_body(prompt, 0, off)
    # what was bought before there was the option is found again
    assert build_jobs([prompt], off)[0].fingerprint.startswith("3a527d7529d876bc")
    assert build_jobs([prompt], on)[0].fingerprint != build_jobs([prompt], off)[0].fingerprint


def test_max_tokens_is_the_partitions_unless_the_data_set_says_otherwise(
    make_prompts: Make,
) -> None:
    long = replace(make_prompts(1)[0], partition="long")
    assert build_jobs([long], WISH)[0].max_tokens == 128
    own = replace(WISH, generate=replace(WISH.generate, max_tokens=7))
    assert build_jobs([long], own)[0].max_tokens == 7
    assert build_body(long, 0, own)["max_tokens"] == 7


def test_each_sample_has_a_seed_and_a_fingerprint_of_its_own(make_prompts: Make) -> None:
    jobs = build_jobs(make_prompts(20), WISH)
    seeds = {build_body(job.prompt, job.sample, WISH)["seed"] for job in jobs}
    assert len(jobs) == len(seeds) == len({job.fingerprint for job in jobs}) == 40
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert jobs == build_jobs(make_prompts(20), WISH)


@pytest.mark.parametrize(
    "changed",
    [
        replace(WISH, sampling=replace(WISH.sampling, temperature=0.8)),
        replace(WISH, sampling=replace(WISH.sampling, seed=4)),
        replace(WISH, endpoint=replace(WISH.endpoint, model="n")),
        replace(WISH, endpoint=replace(WISH.endpoint, provider={"only": ["q"]})),
        replace(WISH, generate=replace(WISH.generate, max_tokens=7)),
        LOCAL,
    ],
)
def test_whatever_changes_the_request_changes_the_fingerprint(
    make_prompts: Make, changed: Wish
) -> None:
    prompts = make_prompts(3)
    old = {job.fingerprint for job in build_jobs(prompts, WISH)}
    assert not old & {job.fingerprint for job in build_jobs(prompts, changed)}


def test_another_target_is_asked_anew_and_another_budget_is_not(make_prompts: Make) -> None:
    prompts = make_prompts(3)
    assert build_jobs(prompts, LOCAL) != build_jobs(prompts, replace(LOCAL, target_revision="r2"))
    richer = replace(LOCAL, generate=replace(LOCAL.generate, budget_tokens=9))
    assert build_jobs(prompts, LOCAL) == build_jobs(prompts, richer)


def test_a_new_prompt_moves_no_other(make_prompts: Make) -> None:
    prompts = make_prompts(30)
    few = admission_order(build_jobs(prompts[:20], WISH), 0)
    many = admission_order(build_jobs(prompts, WISH), 0)
    known = {job.fingerprint for job in few}
    assert [j for j in many if j.fingerprint in known] == few
    assert few != build_jobs(prompts[:20], WISH)
    assert few != admission_order(few, 1)


def test_stored_rows_fill_the_budget_in_order_and_the_rest_is_asked(make_prompts: Make) -> None:
    jobs = build_jobs(make_prompts(3), WISH)
    names = [job.fingerprint for job in jobs]
    sizes = {names[0]: (60, 0.5), names[2]: (50, 0.5), names[3]: (10, 0.5)}
    held, todo = split_jobs(jobs, sizes, {names[1]}, replace(WISH.generate, budget_tokens=100))
    assert [job.fingerprint for job in held] == [names[0], names[2]]
    assert [job.fingerprint for job in todo] == names[4:]
