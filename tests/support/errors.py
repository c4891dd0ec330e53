"""What the harness raises: one sentence for the person who runs the tests or the demo."""


class HarnessError(Exception):
    """A containerd, a package or a machine is not what the harness needs; the message says what to do."""


class UnavailableError(HarnessError):
    """No registry gave a program. A test that needs it is skipped, but in CI it fails."""


class NotBuiltError(HarnessError):
    """A set of tests/ground is not built. A test that needs it is skipped."""
