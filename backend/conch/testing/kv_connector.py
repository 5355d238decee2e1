"""What every KV connector promises."""

from __future__ import annotations

from conch.api import BuildContext, KVConnector
from conch.testing.context import make_context


class KVConnectorContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> KVConnector:
        """Build the connector under test."""
        raise NotImplementedError

    def test_is_a_connector(self) -> None:
        """It has the methods of the seam."""
        assert isinstance(self.build(make_context()), KVConnector)

    def test_a_handle_that_nobody_gave_has_nothing_to_pull(self) -> None:
        """False, not an exception: the caller computes the KV itself."""
        connector = self.build(make_context())
        for handle in (b"", b"\x00", b"not a handle" * 10):
            assert connector.pull(handle, [1, 2]) is False

    def test_release_may_be_repeated(self) -> None:
        """Unknown ids are ignored, and what is withdrawn cannot be pulled."""
        connector = self.build(make_context())
        handle = connector.offer(1, [0, 1])
        for _ in range(2):
            connector.release(1)
            connector.release(99)
        assert handle is None or connector.pull(handle, [2, 3]) is False
