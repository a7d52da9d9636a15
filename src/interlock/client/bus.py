"""The command bus for services: receive what is sent to yours, and what your org is told."""

from interlock.client._bus_consumer import Consumer, Delivery, TelemetryConsumer, TelemetryMessage
from interlock.wire.bus_inbox import DeliveredCommand, DeliveredMessage

__all__ = [
    "Consumer",
    "DeliveredCommand",
    "DeliveredMessage",
    "Delivery",
    "TelemetryConsumer",
    "TelemetryMessage",
]
