"""Fifty readers on home lines feed one another: the publisher sends a version a few times, and little is sent twice."""

from __future__ import annotations

from pulsenet.testing.spread import measure_spread


def test_the_publisher_sends_a_version_at_most_five_times_to_fifty_readers() -> None:
    """20 MB in 20 chunks; lines of 20 to 1,000 Mb/s down and 5 to 100 up, the publisher's 1,000 (A-PEER-2)."""
    measured = measure_spread(1, 50, payload_size_bytes=20 * 4_000, chunk_size_bytes=4_000, scale=250.0)
    assert 1.0 <= measured.publisher_payloads <= 5.0
    assert measured.received_payloads <= 1.25
