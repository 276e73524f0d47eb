"""Where requests go: what promotions, channels and the instances' own reports mean for each served name."""

from msgspec import structs

from kite.ledger import Route
from kite_arbitrator.records import Feed, Selected
from kite_arbitrator.routes import rerouted, routes
from kite_arbitrator.state import State, put
from kite_arbitrator.testing import BASE, NODE, Story
from kite_schemas.arbitration import Channel
from kite_schemas.yoco import State as Life

FIRST, SECOND, STANDBY = (f"{NODE}-{BASE}-{number}" for number in range(3))


def promoted() -> tuple[Story, str]:
    """Two ready instances and a standby asleep, and a blend that both ready ones hold; returns its version."""
    story = Story().up(ready=2)
    story.promote("fraud")
    return story, story.state.blends["risk"].resident.version


def woken(state: State, versions: tuple[str, ...]) -> State:
    """The standby is ready, and holds these versions."""
    standby = structs.replace(state.instances[STANDBY], state=Life.READY, summoned=True, versions=versions)
    return put(state, standby)


def select(state: State, channel: Channel) -> State:
    return put(state, Selected(blend="risk", channel=channel, since_us=state.now_us, pos=state.pos + 1))


def to(found: tuple[Route, ...], name: str) -> list[str]:
    return [route.instance for route in found if route.name == name]


def test_a_fleet_that_is_not_up_yet_has_no_routes():
    assert routes(Story().begin().state) == ()


def test_a_base_is_answered_by_every_instance_that_serves_and_by_no_sleeping_one():
    story = Story().up(ready=2)
    found = routes(story.state)
    assert to(found, BASE) == [FIRST, SECOND]
    endpoint = story.state.instances[FIRST].endpoint
    assert found[0] == Route(BASE, BASE, FIRST, endpoint, "upcycle", story.state.instances[FIRST].pos)


def test_a_blend_is_answered_by_every_serving_instance_with_its_promoted_version():
    story, version = promoted()
    found = [route for route in routes(story.state) if route.name == "risk"]
    assert [(route.instance, route.version, route.channel) for route in found] == [
        (FIRST, version, "upcycle"),
        (SECOND, version, "upcycle"),
    ]
    bare = structs.replace(story.state.instances[SECOND], versions=("risk@other",))
    assert to(routes(put(story.state, bare)), "risk") == [FIRST]


def test_on_the_upcycle_channel_a_woken_standby_with_the_version_answers_too():
    story, version = promoted()
    assert to(routes(select(woken(story.state, (version,)), Channel.UPCYCLE)), "risk") == [FIRST, SECOND, STANDBY]


def test_on_the_yoco_channel_the_former_ones_answer_until_a_standby_is_ready():
    story, version = promoted()
    state = select(story.state, Channel.YOCO)
    assert to(routes(state), "risk") == [FIRST, SECOND]
    assert to(routes(woken(state, ())), "risk") == [FIRST, SECOND], "it does not hold the version yet"
    found = routes(woken(state, (version,)))
    assert to(found, "risk") == [STANDBY]
    assert to(found, BASE) == [FIRST, SECOND, STANDBY], "the base is nobody's channel"
    assert {route.channel for route in found if route.name == "risk"} == {"yoco"}


def test_a_standby_on_its_way_to_sleep_answers_nothing_more():
    story, version = promoted()
    state = woken(select(story.state, Channel.YOCO), (version,))
    drained = structs.replace(state.instances[STANDBY], summoned=False)
    assert to(routes(put(state, drained)), "risk") == [FIRST, SECOND]


def test_a_route_names_the_later_of_promotion_and_channel():
    story, version = promoted()
    blend = story.state.blends["risk"]
    selected = Selected(blend="risk", channel=Channel.UPCYCLE, since_us=1, pos=blend.pos - 1)
    assert {route.pos for route in routes(put(story.state, selected)) if route.name == "risk"} == {blend.pos}
    selected = structs.replace(selected, pos=blend.pos + 1)
    found = routes(woken(put(story.state, selected), (version,)))
    assert {route.pos for route in found if route.name == "risk"} == {blend.pos + 1}


def test_nothing_goes_to_a_node_that_is_lost():
    story, _ = promoted()
    feed = Feed(node=NODE, boot="boot")
    assert routes(put(story.state, feed)) == routes(story.state)
    assert routes(put(story.state, structs.replace(feed, lost=True))) == ()


def test_a_blend_with_the_name_of_a_base_is_not_given_to_those_who_ask_for_the_base():
    story, _ = promoted()
    blend = structs.replace(story.state.blends["risk"], name=BASE)
    assert {route.version for route in routes(put(story.state, blend)) if route.name == BASE} == {BASE}


def test_routes_are_computed_again_only_when_something_they_read_has_changed():
    story, version = promoted()
    state = put(story.state, Feed(node=NODE, boot="boot"))
    heard = put(state, Feed(node=NODE, boot="boot", seq=2, pos=9))
    assert not rerouted(state, structs.replace(heard, pos=99, now_us=99))
    assert rerouted(state, put(state, Feed(node=NODE, boot="boot", lost=True)))
    assert rerouted(state, woken(state, (version,)))
    assert rerouted(state, select(state, Channel.YOCO))
    assert rerouted(state, structs.replace(state, blends={}))
