"""The command bus for services: send commands, receive commands, and receive your org's telemetry."""

from interlock.client._bus_consumer import Consumer, Delivery, TelemetryConsumer, TelemetryMessage
from interlock.client._bus_producer import Command, Producer
from interlock.wire import CommandVerdict, TenantConfig
from interlock.wire.bus_inbox import DeliveredCommand, DeliveredMessage

__all__ = [
    "Command",
    "CommandVerdict",
    "Consumer",
    "DeliveredCommand",
    "DeliveredMessage",
    "Delivery",
    "Producer",
    "TelemetryConsumer",
    "TelemetryMessage",
    "TenantConfig",
]
