"""The exceptions a user can meet. Each carries one sentence: what is wrong, the value seen, what to do."""


class SpecDecError(Exception):
    """Base of every error this package raises for something the caller can mend."""


class OptionError(SpecDecError):
    """An option, request field or argument has a value that cannot be used."""


class CheckpointError(SpecDecError):
    """A checkpoint cannot be found, fetched or read."""


class UnsupportedModelError(SpecDecError):
    """The model loads but cannot be generated with losslessly: its cache cannot be rewound."""


class PairingError(SpecDecError):
    """A drafter does not fit the target."""
