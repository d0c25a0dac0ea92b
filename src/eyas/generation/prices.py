"""Turn token counts into dollars and back."""

from eyas.settings import Prices


def cost_usd(prices: Prices, *, prompt_tokens: int, completion_tokens: int) -> float:
    """Return what a request costs, rounded to a billionth of a dollar so that sums stay exact."""
    prompt = prompt_tokens * prices.prompt_usd_per_mtok
    completion = completion_tokens * prices.completion_usd_per_mtok
    return round((prompt + completion) / 1e6, 9)


def usd_per_mtok(usd: float, tokens: int) -> float:
    """Return dollars per million tokens; 0 where there are no tokens."""
    return round(usd / tokens * 1e6, 6) if tokens else 0.0


def usd_per_token(price_usd_per_mtok: float) -> str:
    """Return a price in OpenRouter's form: a string, dollars per single token."""
    return f"{price_usd_per_mtok / 1e6:.12f}".rstrip("0").rstrip(".") or "0"
