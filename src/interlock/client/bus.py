"""The command bus for services: send commands, receive commands, and receive your org's telemetry."""

from interlock.client._bus_consumer import Consumer, Delivery, TelemetryConsumer, TelemetryMessage
from interlock.client._bus_producer import Command, Producer, delivered
from interlock.wire.bus_messages import DeliveredCommand, DeliveredMessage
from interlock.wire.bus_registry import TenantConfig
from interlock.wire.commands import CommandVerdict

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
    "delivered",
]
