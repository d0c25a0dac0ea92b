import random

from eyas.prompts.rows import ParsedRow
from eyas.prompts.screening import Screening, screens_of
from eyas.prompts.selection import Plan, Selection, TargetFacts, select
from eyas.records import Prompt
from eyas.settings import PartitionRule

TARGET = TargetFacts(
    count_tokens=lambda messages, tools: 1, has_special_text=lambda text: False, context_tokens=9
)
ON = Screening(near_duplicate_jaccard=0.8, passage_words=13)


def sentence(number: int) -> str:
    """Return 30 words that no other number has."""
    return " ".join(f"w{number}x{i}" for i in range(30))


def row(text: str, name: str = "") -> ParsedRow:
    return ParsedRow(upstream_id=name, messages=({"role": "user", "content": text},))


def selected(
    rows: list[ParsedRow],
    screening: Screening,
    *,
    heldout: int = 0,
    max_rows: int | None = None,
    seed: int = 0,
) -> Selection:
    plan = Plan(
        dataset="d",
        kind="prompts",
        licence="MIT",
        heldout_permille=heldout,
        max_rows=max_rows,
        seed=seed,
        partition=None,
        partitions={"any": PartitionRule(max_prompt_tokens=None, max_tokens=1)},
        screening=screening,
    )
    found = select(rows, plan, TARGET)
    out = len(found.prompts) + len(found.heldout) + len(found.rejects) + found.not_selected
    assert found.rows_in == len(rows) == out
    return found


def reasons(found: Selection) -> list[str]:
    return [violation.rule for violation in found.rejects]


def test_nothing_is_screened_unless_asked_for() -> None:
    assert screens_of(Screening(), []) == []
    rows = [row(sentence(1)), row(sentence(1) + "!")]
    assert len(selected(rows, Screening()).prompts) == 2


def test_near_duplicate_is_dropped_and_names_the_kept_one() -> None:
    found = selected([row(sentence(1)), row(sentence(1) + "!"), row(sentence(2))], ON)
    assert reasons(found) == ["near_duplicate"]
    assert len(found.prompts) == 2
    assert found.rejects[0].detail.removeprefix("of ") in {prompt.id for prompt in found.prompts}


def test_prompt_with_a_passage_of_an_evaluation_prompt_is_dropped() -> None:
    copied = " ".join(sentence(7).split()[4:17])
    screening = Screening(passage_words=13, evaluation=(row(sentence(7)),))
    found = selected([row(f"Tell me: {copied}?"), row(sentence(8))], screening)
    assert reasons(found) == ["evaluation_overlap"]
    assert found.rejects[0].detail == copied[:120]
    assert len(found.prompts) == 1


def test_prompt_like_a_heldout_one_is_dropped_and_the_heldout_one_stays() -> None:
    plain = selected([row(sentence(i), str(i)) for i in range(40)], ON, heldout=300)
    assert plain.rejects == ()
    heldout = plain.heldout[0].messages[0]["content"]
    names = (f"again {i}" for i in range(100))
    copies = [row(f"{heldout} {i}", name) for i, name in enumerate(names)]
    rows = [row(sentence(i), str(i)) for i in range(40)]
    for screening, reason in (
        (Screening(near_duplicate_jaccard=0.8), "near_duplicate"),
        (Screening(passage_words=13), "evaluation_overlap"),
    ):
        whole = selected(rows, screening, heldout=300)
        # one copy that the hash leaves on the side of the prompts
        copy = next(c for c in copies if not selected([c], screening, heldout=300).heldout)
        found = selected([*rows, copy], screening, heldout=300)
        assert reasons(found) == [reason]
        assert found.heldout == whole.heldout
        assert found.prompts == whole.prompts
    off = Screening(passage_words=13, against_heldout=False)
    assert reasons(selected([*rows, copies[0]], off, heldout=300)) == []


def test_screening_goes_on_until_enough_prompts_are_found() -> None:
    twins = [row(sentence(i) + mark, f"{i}{mark}") for i in range(20) for mark in ("", "!", "?")]
    found = selected(twins, ON, max_rows=20)
    assert len(found.prompts) == 20
    assert set(reasons(found)) <= {"near_duplicate"}
    few = selected(twins, ON, max_rows=3)
    assert few.prompts == found.prompts[:3]
    assert few.not_selected == 60 - 3 - len(few.rejects)


def test_what_is_dropped_does_not_depend_on_the_order_of_the_rows() -> None:
    rows = [row(sentence(i) + mark, f"{i}{mark}") for i in range(12) for mark in ("", "!", "?")]
    first = selected(rows, ON, heldout=200)
    random.Random(1).shuffle(rows)
    second = selected(rows, ON, heldout=200)
    assert (first.prompts, first.heldout) == (second.prompts, second.heldout)
    assert {v.id for v in first.rejects} == {v.id for v in second.rejects}


def test_system_prompts_do_not_make_prompts_alike_and_tools_set_them_apart() -> None:
    boilerplate = {"role": "system", "content": sentence(0)}

    def prompt(name: str, *tools: str) -> Prompt:
        return Prompt(
            id=name,
            dataset="d",
            upstream_id="",
            messages=(boilerplate, {"role": "user", "content": name}),
            tools=tuple({"function": {"name": tool}} for tool in tools),
            prompt_tokens=1,
            partition="any",
            licence="MIT",
        )

    (near,) = screens_of(Screening(near_duplicate_jaccard=0.8), [])
    assert near(prompt("What is a list?")) is None
    assert near(prompt("What is a tuple?")) is None
    assert near(prompt("What is a list?!", "search")) is None
    assert near(prompt("What is a list!")) is not None
