"""Cost: hand-computed hours, money and electricity, of one kind of GPU and of two, with environments."""

from pathlib import Path

import pytest
from derived import by_name
from run_tables import tiny

from pipelinerl.config.run import PriceConfig
from pipelinerl.hardware.catalogue import find_gpu
from pipelinerl.records.reports import CostReport, Prices, Rates

BOTH = Prices(gpu_usd=2.0, gpu_watts=700.0, generation_usd=0.5, generation_watts=400.0, environment_usd=0.1)


def test_the_cost_of_a_run_is_that_by_hand() -> None:
    """Two hours of 4 GPUs at 12 USD and 2800 W, for 8 million tokens."""
    cost = Rates(gpus=4, usd_per_hour=12.0, watts=2800.0).cost(7200.0, tokens=8e6)
    assert cost == CostReport(
        gpu_hours=8.0, gpu_hours_per_million_tokens=1.0, usd=24.0, usd_per_million_tokens=3.0, kwh=5.6
    )


def test_a_run_that_trained_on_nothing_has_no_cost_per_token() -> None:
    cost = Rates(gpus=4, usd_per_hour=None, watts=None).cost(3600.0, tokens=0)
    assert cost.to_dict() == {"gpu_hours": 4.0, "gpu_hours_per_million_tokens": None}


@pytest.mark.parametrize(
    ("kind", "usd", "watts"),
    [("pipeline", 2 * 2.0 + 6 * 0.5, 2 * 700.0 + 6 * 400.0), ("conventional", 16.0, 5600.0)],
)
def test_each_kind_of_gpu_has_its_own_price_and_power_and_colocated_ones_are_those_that_train(
    kind: str, usd: float, watts: float
) -> None:
    """Of 8 GPUs 6 generate, or all do both."""
    cluster = ("cluster.accelerators=8", "cluster.generation_accelerators=6")
    rates = BOTH.rates(tiny(*cluster, f"scheduler.kind={kind}"))
    assert (rates.usd_per_hour, rates.watts, rates.usd_per_gpu_hour) == (usd, watts, usd / 8)


def test_without_a_price_of_one_kind_there_is_no_money() -> None:
    half = Prices(gpu_usd=None, gpu_watts=700.0, generation_usd=1.0, generation_watts=None, environment_usd=0.0)
    rates = half.rates(tiny())
    assert not rates.known
    assert half.rates(tiny("scheduler.kind='conventional'")).watts is not None


def test_a_run_file_may_give_the_price_of_each_kind() -> None:
    prices = Prices.of(tiny("price.gpu_hour=2.5", "price.generation_gpu_hour=1.5", "price.environment_hour=0.2"))
    assert (prices.gpu_usd, prices.generation_usd, prices.environment_usd) == (2.5, 1.5, 0.2)
    assert Prices.of(tiny("price.gpu_hour=2.5")).generation_usd == 2.5


def test_a_price_that_nobody_gave_is_assumed_only_where_asked_and_says_its_source() -> None:
    mixed = by_name(generation_gpu="H20")
    h100 = find_gpu("H100")
    assumed = Prices.of(mixed, assume=True)
    assert (assumed.gpu_usd, assumed.generation_usd) == (h100.price_per_hour, None)
    assert assumed.notes == (
        f"{h100.price_per_hour:.2f} USD per H100-hour ({h100.price_source})", "no price of H20 is known"
    )  # fmt: skip
    recorded = Prices.of(mixed)
    assert (recorded.gpu_usd, recorded.generation_usd) == (None, None)
    given = mixed.model_copy(update={"price": PriceConfig(gpu_hour=2.5, generation_gpu_hour=1.0)})
    own = Prices.of(given, assume=True)
    assert (own.gpu_usd, own.generation_usd, own.notes) == (2.5, 1.0, ())


def test_the_price_of_your_own_gpu_is_no_assumption(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "bf16_flops = 500e12\nmemory_bytes = 64e9\nbandwidth = 2e12\nnetwork = 25e9\nprice_per_hour = 1.5\n"
    )
    named = by_name()
    run = named.model_copy(update={"hardware": named.hardware.model_copy(update={"gpu": str(file)})})
    for assume in (False, True):
        prices = Prices.of(run, assume=assume)
        assert (prices.gpu_usd, prices.generation_usd, prices.notes) == (1.5, 1.5, ())


def test_gpus_of_another_kind_have_their_own_power_and_no_price_that_nobody_gave() -> None:
    mixed = by_name(generation_gpu="H20").model_copy(update={"price": PriceConfig(gpu_hour=2.5)})
    prices = Prices.of(mixed)
    assert (prices.gpu_usd, prices.generation_usd) == (2.5, None)
    assert prices.rates(mixed).watts == 8 * 700 + 8 * 400
