"""All exceptions that KVBoost raises on purpose.

    KVBoostError
    ├── ConfigError (ValueError)             an unknown option, or a value that is not allowed
    │   └── StructuredOutputError            a format that answers cannot be held to
    ├── PromptError (ValueError)             the prompt cannot be served
    │   ├── ContextLengthError               it is longer than the model's context
    │   ├── ImageError                       an image of it cannot be read
    │   └── KVTooLargeError                  its KV would not fit, even if it ran alone
    ├── QueueFullError                       too many requests are waiting
    ├── ShuttingDownError                    the engine takes no new requests
    ├── RankLostError                        one of the processes that share a model has ended
    ├── ModelError                           the model cannot be loaded or used
    │   ├── ModelNotFoundError (FileNotFoundError)
    │   ├── UnsupportedModelError (ValueError)   its architecture does not allow what was asked
    │   └── ChecksumError                    downloaded weights have another checksum
    ├── AdapterError (ValueError)            an adapter cannot be loaded or unloaded
    │   ├── AdapterNotFoundError (FileNotFoundError)
    │   └── UnknownAdapterError              no adapter of that name is loaded
    ├── CacheFolderError (OSError)           the cache folder cannot be used
    ├── ForgetError                          a text could not be removed everywhere
    ├── PinError                             a text cannot be pinned: there is no room for it
    └── ServerError                          a server cannot be reached, or refuses what is asked

An error about the caller's mistake names the value, what is allowed, and what to do.
"""


class KVBoostError(Exception):
    """The base of all errors that this package raises."""


class ConfigError(KVBoostError, ValueError):
    """An option is unknown, or its value is not allowed."""


class StructuredOutputError(ConfigError):
    """Answers cannot be held to the format that a request asks for."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option} cannot be enforced: {reason}")
        self.option = option
        self.reason = reason


class PromptError(KVBoostError, ValueError):
    """The prompt cannot be served."""


class ContextLengthError(PromptError):
    """The prompt does not fit the model's context."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens:,} tokens, but the model's context holds {limit:,} "
            "and at least one is needed for the answer; shorten the prompt or choose a model "
            "with a longer context"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class ImageError(PromptError):
    """An image of the prompt cannot be read, or is too large."""


class KVTooLargeError(PromptError):
    """The KV of this request would not fit, even if it ran alone."""

    def __init__(
        self, num_tokens: int, needed: int, budget: int, option: str = "max_kv_bytes"
    ) -> None:
        """``option``: the one that gives the budget."""
        remedy = f"raise {option}"
        if option == "max_kv_bytes":
            remedy += ", or keep rows outside of it with far_kv_bytes"
        super().__init__(
            f"{num_tokens:,} tokens, prompt and answer, need {needed:,} bytes of KV, but "
            f"{option} leaves {budget:,}; shorten the prompt, lower max_new_tokens or {remedy}"
        )
        self.num_tokens = num_tokens
        self.needed = needed
        self.budget = budget


class QueueFullError(KVBoostError):
    """No more requests may wait, or no more of this tenant."""

    def __init__(self, waiting: int, retry_after: int, tenant: str = "") -> None:
        """``tenant``: whose share of the queue is used up; empty if the whole queue is full."""
        full = (
            f"{waiting:,} requests of tenant {tenant!r} are waiting; the rest of the queue is "
            "reserved for other tenants"
            if tenant
            else f"{waiting:,} requests are waiting, as many as max_waiting allows"
        )
        super().__init__(f"{full}; try again in about {retry_after} s")
        self.waiting = waiting
        self.retry_after = retry_after


class ShuttingDownError(KVBoostError):
    """The engine takes no new requests."""


class RankLostError(KVBoostError):
    """One of the processes over which a model is split has ended or failed."""


class ModelError(KVBoostError):
    """The model cannot be loaded or used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no such model: no folder, file or known name, and no hub id that can be reached."""


class UnsupportedModelError(ModelError, ValueError):
    """The architecture does not allow what was asked."""


class ChecksumError(ModelError):
    """Downloaded weights do not have the checksum that KVBoost knows."""


class AdapterError(KVBoostError, ValueError):
    """An adapter cannot be loaded or unloaded."""


class AdapterNotFoundError(AdapterError, FileNotFoundError):
    """There is no adapter in the folder."""


class UnknownAdapterError(AdapterError):
    """No adapter of this name is loaded."""


class ForgetError(KVBoostError):
    """A text that was to be forgotten could not be removed everywhere."""


class PinError(KVBoostError):
    """There is no room to pin a text."""


class CacheFolderError(KVBoostError, OSError):
    """The cache folder cannot be created or written."""


class ServerError(KVBoostError):
    """A server cannot be reached, refuses a request, or runs without KVBoost."""
