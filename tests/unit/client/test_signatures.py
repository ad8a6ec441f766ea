"""Signatures of the public API: every option with its type and default, as it is declared once, and nothing else."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_type_hints

import pytest

from rayqueue import Consumer, Producer, RayQueue
from rayqueue.client import factories
from rayqueue.client.consumer.poll import Listener
from rayqueue.client.consumer.wanted import Options
from rayqueue.client.options import ConsumerOptions, ProducerOptions
from rayqueue.client.producer.encoding import EncodingProducer
from rayqueue.client.producer.partitioners import CustomPartitioner
from rayqueue.client.producer.topic import Topic, TopicProducer
from rayqueue.config import ConsumerSettings, ProducerSettings, Section
from rayqueue.protocol.topics import TopicPartition, TopicSettings, declared
from rayqueue.testing.memory import MemoryQueue
from rayqueue.values import DESERIALIZERS, SERIALIZERS

Parameters = dict[str, inspect.Parameter]


def options_of(call: Callable[..., Any]) -> Parameters:
    """What can be given by name only. ``**anything`` fails here."""
    parameters = inspect.signature(call).parameters
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD], call
    return {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def type_of(call: Callable[..., Any], annotation: str) -> Any:
    names = {**vars(sys.modules[call.__module__]), "re": re, "Iterable": Iterable, "Listener": Listener}
    names |= {"Literal": Literal, "CustomPartitioner": CustomPartitioner, "TopicPartition": TopicPartition}
    return eval(annotation, names)


def declared_type(section: type[Section], name: str) -> Any:
    if name == "partitioner":  # a file can only name one
        return Literal["consistent", "murmur2", "roundrobin", "sticky"] | CustomPartitioner | None
    return section.model_fields[name].annotation | None  # type: ignore[operator]


CALLS = [
    (RayQueue.producer_async, ProducerSettings, ProducerOptions, SERIALIZERS.keys()),
    (vars(Topic)["producer_async"], ProducerSettings, ProducerOptions, frozenset()),
    (RayQueue.consumer_async, ConsumerSettings, ConsumerOptions, DESERIALIZERS.keys()),
    (vars(Topic)["consumer_async"], ConsumerSettings, ConsumerOptions, frozenset()),
    (RayQueue.producer, ProducerSettings, ProducerOptions, SERIALIZERS.keys()),
    (Topic.producer, ProducerSettings, ProducerOptions, frozenset()),
    (RayQueue.consumer, ConsumerSettings, ConsumerOptions, DESERIALIZERS.keys()),
    (Topic.consumer, ConsumerSettings, ConsumerOptions, frozenset()),
]


@pytest.mark.parametrize(
    ("call", "section", "typed", "others"), CALLS, ids=lambda each: getattr(each, "__qualname__", "")
)
def test_options_that_are_settings(call: Any, section: type[Section], typed: Any, others: Iterable[str]) -> None:
    options = options_of(call)
    given = options.keys() | {"group"} if typed is ConsumerOptions else options.keys()  # a topic's is in its place
    assert given - set(others) == get_type_hints(typed).keys()
    for name in section.model_fields:
        assert options[name].default is None, "as configured"
        assert type_of(call, options[name].annotation) == declared_type(section, name) == get_type_hints(typed)[name]
        field = section.model_fields[name]
        told = f"{name}: {field.description} (None: as configured; {field.default!r} by default)"
        assert told in inspect.getdoc(call)  # type: ignore[operator]


def test_options_of_a_consumer_that_are_not_settings() -> None:
    made_with = inspect.signature(Options).parameters
    names = get_type_hints(ConsumerOptions).keys() - ConsumerSettings.model_fields.keys() - {"group"}
    assert names == made_with.keys() - {"topics", "group"}
    for call in (RayQueue.consumer, Topic.consumer):
        for name in names:
            assert options_of(call)[name].default == made_with[name].default
            assert type_of(call, options_of(call)[name].annotation) == get_type_hints(ConsumerOptions)[name]


def test_the_first_overload_spells_out_what_the_others_have_as_a_dict() -> None:
    """Editors show the overloads, ``help`` what is made of them."""
    from typing_extensions import get_overloads

    for call in (factories.Factories.producer, factories.Factories.consumer):
        first, *others = get_overloads(call)
        shown, plain = options_of(call), options_of(first)
        assert shown.keys() == plain.keys()
        forms = inspect.signature(others[-1]).parameters.keys()
        assert all(shown[name] == each for name, each in plain.items() if name not in forms)
        for each in others:
            rest = inspect.signature(each).parameters["options"]
            assert rest.annotation in ("Unpack[ProducerOptions]", "Unpack[ConsumerOptions]")
            assert inspect.signature(each).parameters.keys() - {"options"} <= inspect.signature(call).parameters.keys()


@pytest.mark.parametrize("name", ["send", "send_async", "send_many", "send_many_async"])
def test_a_topics_producer_sends_as_a_producer_does(name: str) -> None:
    plain = inspect.signature(getattr(Producer, name))
    this, topic, *rest = plain.parameters.values()
    assert topic.name == "topic"
    assert list(inspect.signature(getattr(TopicProducer, name)).parameters.values()) == [this, *rest]
    assert inspect.signature(getattr(EncodingProducer, name)) == plain
    assert getattr(TopicProducer, name).__doc__ == getattr(Producer, name).__doc__


@pytest.mark.parametrize("call", [RayQueue.create_topic, RayQueue.create_topic_async])
def test_settings_of_a_new_topic(call: Callable[..., Any]) -> None:
    options = options_of(call)
    settings = declared(TopicSettings)
    assert options.keys() - settings.keys() == {"if_missing", "wait", "on_progress"}
    for name, setting in settings.items():
        assert options[name].default == setting.default
        assert type_of(call, options[name].annotation) == (setting.kind | None if setting.optional else setting.kind)
        assert f"{name}: {setting.doc}" in inspect.getdoc(call)  # type: ignore[operator]


@pytest.mark.parametrize("call", [RayQueue.queue, RayQueue.queue_async])
def test_settings_of_a_queue(call: Callable[..., Any]) -> None:
    """All but those that are a log's, each as a topic has it."""
    options = options_of(call)
    settings = declared(TopicSettings)
    assert options.keys() - settings.keys() == {"model", "key_model", "result_model", "create"}
    of_logs = {"queue", "prefer_leader", "retention_ms", "retention_bytes", "retention_consumed"}
    assert settings.keys() - options.keys() == of_logs
    for name in options.keys() & settings.keys():
        setting = settings[name]
        assert options[name].default == setting.default
        assert type_of(call, options[name].annotation) == (setting.kind | None if setting.optional else setting.kind)


@pytest.mark.parametrize("call", [RayQueue.alter_topic, RayQueue.alter_topic_async])
def test_settings_of_a_topic_that_can_change(call: Callable[..., Any]) -> None:
    options = options_of(call)
    settings = {name: each for name, each in declared(TopicSettings).items() if each.changes != "never"}
    assert options.keys() - settings.keys() == {"wait", "on_progress"}
    for name, setting in settings.items():
        assert repr(options[name].default) == "UNCHANGED"
        assert type_of(call, options[name].annotation) == (setting.kind | None if setting.optional else setting.kind)


PUBLIC = [RayQueue, Producer, Consumer, Topic, TopicProducer, MemoryQueue]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda each: each.__name__)
def test_nothing_takes_just_anything(public: type) -> None:
    """No ``**options: Any``: an editor, and whoever reads ``help``, would learn nothing from it."""
    seen = 0
    for name, call in inspect.getmembers(public, callable):
        if name.startswith("_") and name != "__init__":
            continue
        seen += 1
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                assert parameter.annotation in ("Never", "Unpack[ProducerOptions]", "Unpack[ConsumerOptions]"), name
    assert seen > 4
