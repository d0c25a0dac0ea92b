"""The prompts' table."""

from eyas.desk.asked import prompt_rows, prompt_table
from eyas.desk.results import Results

LENGTHS = {"prompt_tokens_p50": 40, "prompt_tokens_p90": 90, "prompt_tokens_max": 1234}


def test_languages_stand_beside_lengths_the_most_common_first() -> None:
    told = LENGTHS | {"language_de": 7, "script_latin": 9, "language_en": 1070, "language_ar": 7}
    metrics = {"prepare-chat": told, "prepare-old": LENGTHS, "prepare-code": {"language_en": 3}}
    results = Results(metrics=metrics, evaluation=None, datasets=("chat", "old", "code", "none"))
    rows = prompt_rows(results)
    assert rows[0] == ("chat", "40", "90", "1,234", "en 1,070, ar 7, de 7")
    assert (rows[1][0], rows[1][-1], len(rows)) == ("code", "en 3", 2)
    assert "The prompts, in tokens, and their languages" in "".join(prompt_table(results))


def test_a_run_that_told_no_language_has_no_table() -> None:
    metrics = {"prepare-chat": LENGTHS}
    assert prompt_table(Results(metrics=metrics, evaluation=None, datasets=("chat",))) == []
