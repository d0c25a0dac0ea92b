"""Numbers of the last minute, and each provider's part."""

from eyas.generation.meter import Meter, quantiles


def test_only_the_last_minute_counts_in_rates_and_the_whole_run_in_parts() -> None:
    meter = Meter()
    meter.answered("A", 10.0, latency_s=2.0, tokens=(5, 100), usd=0.1, truncated=False)
    meter.answered("A", 100.0, latency_s=2.0, tokens=(5, 300), usd=0.1, truncated=True)
    meter.failed("B", "rate_limited", 20.0)
    meter.failed("", "connect", 99.0)
    facts = meter.facts(now_s=110.0, elapsed_s=110.0)
    assert facts["tokens_per_s"] == 5.0
    assert facts["failures_last_minute"] == {"connect": 1}
    assert facts["providers"]["A"] == {
        "answers": 2,
        "truncated": 1,
        "prompt_tokens": 10,
        "completion_tokens": 400,
        "usd": 0.2,
        "tokens_per_s": 100.0,
        "failures": {},
    }
    assert facts["providers"]["B"]["failures"] == {"rate_limited": 1}


def test_a_young_run_is_measured_over_its_own_time() -> None:
    meter = Meter()
    meter.answered("A", 2.0, latency_s=2.0, tokens=(5, 100), usd=0.1, truncated=False)
    assert meter.facts(now_s=4.0, elapsed_s=4.0)["tokens_per_s"] == 25.0


def test_quantiles_are_of_the_nearest_rank() -> None:
    assert quantiles([]) == {}
    assert quantiles([float(i) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
