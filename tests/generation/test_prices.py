import pytest

from eyas.generation.prices import cost_usd, usd_per_mtok, usd_per_token
from eyas.settings import Prices

PRICES = Prices(prompt_usd_per_mtok=0.1, completion_usd_per_mtok=0.4)


def test_a_million_tokens_cost_their_price() -> None:
    assert cost_usd(PRICES, prompt_tokens=10**6, completion_tokens=10**6) == 0.5


@pytest.mark.parametrize(("usd", "tokens", "price"), [(0.5, 10**6, 0.5), (1.0, 0, 0.0)])
def test_a_price_needs_tokens(usd: float, tokens: int, price: float) -> None:
    assert usd_per_mtok(usd, tokens) == price


@pytest.mark.parametrize(("price", "text"), [(0.1, "0.0000001"), (2.5, "0.0000025"), (0, "0")])
def test_prices_are_told_as_openrouter_tells_them(price: float, text: str) -> None:
    assert usd_per_token(price) == text
