"""Requests to a real server: how many, at once, repeated or fresh, and what becomes of those that fail."""

import asyncio
from itertools import islice

import pytest

from kite.clock import US_PER_S
from kite.engine import Engine, EngineProcess, free_port
from kite.testing.engine import BASE_NAME
from kite.testing.eventually import eventually
from kite.testing.load import Bounds, Bursty, Calm, Prompts, Report, Workers, drive, prompts

SHORT = Prompts(tokens=8)


def repeated(wanted: Prompts, number: int = 2_000) -> float:
    """Return the share of prompts that were asked before."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    for prompt in islice(prompts(wanted, 1), number):
        assert len(prompt) == wanted.tokens
        again += prompt in seen
        seen.add(prompt)
    return again / number


@pytest.mark.parametrize("shared_ppm", [0, 250_000, 900_000, 1_000_000])
def test_prompts_repeat_by_the_given_share(shared_ppm: int):
    assert repeated(Prompts(tokens=64, shared_ppm=shared_ppm)) == pytest.approx(shared_ppm / 1e6, abs=0.03)


def test_one_seed_gives_one_stream_of_prompts():
    first = list(islice(prompts(Prompts(), 1), 20))
    assert list(islice(prompts(Prompts(), 1), 20)) == first
    assert list(islice(prompts(Prompts(), 2), 20)) != first


async def test_workers_ask_until_the_number_is_met(fake_server: EngineProcess):
    asked: list[str] = []

    def routes(name: str) -> list[str]:
        asked.append(name)
        return [fake_server.url]

    report = await drive(routes, BASE_NAME, Workers(number=3), Bounds(seconds=60, requests=30), asked=SHORT)
    assert set(asked) == {BASE_NAME}
    assert 30 <= report.sent < 30 + 3
    assert (report.finished, report.failed, report.in_flight) == (report.sent, 0, 0)
    assert len(report.latencies_us) == report.sent
    fastest, slowest = report.latency_us(0), report.latency_us(1_000_000)
    assert fastest is not None
    assert slowest is not None
    assert 0 < fastest <= slowest


async def test_a_drive_ends_when_its_time_is_over(fake_server: EngineProcess):
    report = await drive(lambda _: [fake_server.url], BASE_NAME, Workers(number=1), Bounds(seconds=0.5), asked=SHORT)
    assert report.sent == report.finished > 0


async def test_a_profile_sends_what_arrives(fake_server: EngineProcess):
    bounds = Bounds(seconds=60, requests=40)
    report = await drive(lambda _: [fake_server.url], BASE_NAME, Calm(rate_milli=40_000), bounds, asked=SHORT)
    assert report.sent + report.skipped == 40
    assert report.finished == report.sent > 0


async def test_arrivals_beyond_the_concurrency_are_skipped(fake_server: EngineProcess):
    """A paused engine holds what it gets: in-flight stays at the bound, the rest is not sent."""
    profile = Bursty(rate_milli=400_000, burst_milli=400_000)
    report = Report()
    async with Engine(fake_server.url) as engine:
        await engine.pause()
        bounds = Bounds(seconds=60, requests=60, concurrency=5)
        driving = asyncio.create_task(
            drive(lambda _: [fake_server.url], BASE_NAME, profile, bounds, asked=SHORT, report=report)
        )
        await eventually(lambda: report.sent + report.skipped >= 60)
        assert (report.sent, report.in_flight) == (5, 5)
        await engine.resume()
        await driving
    assert (report.finished, report.skipped) == (5, 55)


async def test_workers_are_as_many_in_flight_as_there_are(fake_server: EngineProcess):
    report = Report()
    async with Engine(fake_server.url) as engine:
        await engine.pause()
        driving = asyncio.create_task(
            drive(
                lambda _: [fake_server.url],
                BASE_NAME,
                Workers(number=4),
                Bounds(seconds=60, requests=8),
                asked=SHORT,
                report=report,
            )
        )
        await eventually(lambda: report.in_flight == 4)
        await engine.resume()
        await driving
    assert report.finished >= 8


async def test_endpoints_take_turns_and_one_that_is_gone_fails_alone(fake_server: EngineProcess):
    nobody = f"http://127.0.0.1:{free_port()}"
    report = await drive(
        lambda _: [fake_server.url, nobody], BASE_NAME, Workers(number=1), Bounds(seconds=60, requests=10), asked=SHORT
    )
    assert (report.finished, report.failures["engine_unreachable"]) == (5, 5)


async def test_a_name_without_an_endpoint_is_counted_and_asked_for_again(fake_server: EngineProcess):
    report, known = Report(), list[str]()
    driving = asyncio.create_task(
        drive(
            lambda _: known, BASE_NAME, Workers(number=1), Bounds(seconds=60, requests=20), asked=SHORT, report=report
        )
    )
    await eventually(lambda: report.failures["no_route"] > 0)
    known.append(fake_server.url)
    await driving
    assert report.finished == report.sent > 0
    assert report.in_flight == 0


async def test_a_model_that_is_not_served_is_a_refusal(fake_server: EngineProcess):
    bounds = Bounds(seconds=60, requests=3)
    report = await drive(lambda _: [fake_server.url], "risk", Workers(number=1), bounds, model="risk@1", asked=SHORT)
    assert report.failures == {"engine_refused": 3}


async def test_a_drive_that_is_cancelled_leaves_nothing_behind(fake_server: EngineProcess):
    report = Report()
    driving = asyncio.create_task(
        drive(
            lambda _: [fake_server.url],
            BASE_NAME,
            Workers(number=2),
            Bounds(seconds=60),
            asked=SHORT,
            report=report,
        )
    )
    await eventually(lambda: report.finished > 3)
    before = asyncio.all_tasks() - {driving}
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before | {asyncio.current_task()}
    assert report.latencies_us[0] < 60 * US_PER_S
