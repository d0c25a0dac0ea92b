"""Offers, routing, and what is refused before anything is sent."""

from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.generation.market import (
    Offer,
    check_routing,
    dearest,
    longest_context,
    quantization_of,
    read_offers,
    usable,
)
from eyas.settings import Prices


def offer(name: str, prompt: float = 1.0, completion: float = 2.0, **changes: Any) -> Offer:
    values: dict[str, Any] = {
        "provider": name,
        "slug": name.lower().replace(" ", "") + "/int4",
        "quantization": "int4",
        "context_length": 1000,
        "max_completion_tokens": None,
        "prices": Prices(prompt_usd_per_mtok=prompt, completion_usd_per_mtok=completion),
    }
    return Offer(**{**values, **changes})


ENTRY = {
    "provider_name": "Moonshot AI",
    "tag": "moonshotai/int4",
    "quantization": "int4",
    "context_length": 262144,
    "max_completion_tokens": None,
    "pricing": {"prompt": "0.0000006", "completion": "0.0000025"},
}


def test_prices_are_read_per_million_tokens() -> None:
    [found] = read_offers({"endpoints": [ENTRY]})
    assert found.prices.prompt_usd_per_mtok == pytest.approx(0.6)
    assert found.prices.completion_usd_per_mtok == pytest.approx(2.5)
    assert found.names == {"moonshot ai", "moonshotai/int4", "moonshotai"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "not of the known form"),
        ({"endpoints": [ENTRY | {"pricing": None}]}, "not of the known form"),
        ({"endpoints": [ENTRY | {"pricing": {"prompt": "x", "completion": "0"}}]}, "known form"),
        ({"id": "a/b", "endpoints": []}, "'a/b': nobody offers it"),
    ],
)
def test_an_answer_of_another_form_is_told(data: dict[str, Any], words: str) -> None:
    with pytest.raises(EyasError, match=words):
        read_offers(data)


@pytest.mark.parametrize(
    ("routing", "left"),
    [
        ({}, ["A", "B", "C"]),
        ({"only": ["a"]}, ["A"]),
        ({"only": ["A", "c/int4"]}, ["A", "C"]),
        ({"ignore": ["b"]}, ["A", "C"]),
        ({"order": ["b"]}, ["A", "B", "C"]),
        ({"order": ["b"], "allow_fallbacks": False}, ["B"]),
        ({"quantizations": ["fp8"]}, ["C"]),
        ({"max_price": {"completion": 2}}, ["A", "C"]),
        ({"max_price": {"prompt": 0.7}}, ["C"]),
    ],
)
def test_routing_lets_these_through(routing: dict[str, Any], left: list[str]) -> None:
    offers = (offer("A"), offer("B", 1.0, 3.0), offer("C", 0.5, quantization="fp8"))
    assert [one.provider for one in usable(offers, routing, 100)] == left


def test_every_refused_offer_is_named_with_its_reason() -> None:
    offers = (offer("A", 9.0), offer("B", max_completion_tokens=50), offer("C"))
    with pytest.raises(EyasError) as caught:
        usable(offers, {"max_price": {"prompt": 5}, "ignore": ["c"]}, 100)
    words = str(caught.value)
    assert "A: $9 per million prompt tokens is above max_price" in words
    assert "B: at most 50 completion tokens" in words
    assert "C: ignored" in words
    assert "nothing was sent" in words


def test_a_market_without_anyone_who_gives_token_texts_is_refused_before_a_request() -> None:
    sent = frozenset({"max_tokens", "seed", "temperature", "top_p"})
    offers = (offer("A", parameters=sent), offer("B", parameters=sent | {"logprobs"}), offer("C"))
    strict = {"require_parameters": True}
    assert [o.provider for o in usable(offers, strict, 9)] == ["A", "B", "C"]
    assert [o.provider for o in usable(offers, strict, 9, logprobs=True)] == ["B", "C"]
    assert len(usable(offers, {}, 9, logprobs=True)) == 3  # asked, and told nothing by some
    words = "A: does not take logprobs(.|\n)*endpoint.logprobs; nothing was sent"
    with pytest.raises(EyasError, match=words):
        usable(offers[:1], strict, 9, logprobs=True)


def test_a_routing_option_that_would_be_ignored_silently_is_refused() -> None:
    check_routing({"only": ["x"], "max_price": {}})
    with pytest.raises(EyasError, match=r"endpoint\.provider\.alow_fallbacks"):
        check_routing({"alow_fallbacks": False})


def test_the_dearest_prices_the_longest_context_and_an_agreed_quantization() -> None:
    offers = (
        offer("A", 1.0, 5.0),
        offer("B", 2.0, 3.0, context_length=None),
        offer("A", slug="a2"),
    )
    assert dearest(offers) == Prices(prompt_usd_per_mtok=2.0, completion_usd_per_mtok=5.0)
    assert longest_context(offers) is None
    assert longest_context(offers[:1]) == 1000
    assert quantization_of(offers, "A") == "int4"
    assert quantization_of((*offers, offer("A", quantization="fp8")), "A") is None
