"""What the harness raises: one sentence for the person who runs the tests or the demo."""


class HarnessError(Exception):
    """A containerd, a package or a machine is not what the harness needs; the message says what to do."""
