"""The arguments of ``serve run kvboost.deploy:app``."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvboost.config import DEFAULT_MODEL
from kvboost.deploy.router import RouterSettings


class DeployOptions(BaseModel):
    """The options of a deployment. An unknown argument is refused."""

    model_config = ConfigDict(extra="forbid")

    model: str = DEFAULT_MODEL
    """A model's name, a folder, a .gguf file or a hub id, on every machine."""
    replicas: int = Field(1, ge=1)
    """Processes that have the model. With ``max_replicas``, the fewest."""
    max_replicas: int | None = Field(None, ge=1)
    """The most processes; Ray Serve then starts and stops them as the load changes."""
    upscale_seconds: float = Field(30.0, ge=0)
    """The seconds that all replicas must be full, or let requests wait, before one is added."""
    downscale_seconds: float = Field(600.0, ge=0)
    """The seconds that all replicas must be idle before one is removed."""
    fronts: int = Field(1, ge=1)
    """Processes that read and route requests. Each learns for itself what replicas know."""
    redis: str | None = None
    """A store that all replicas share, such as redis://host:6379. New replicas find there what
    others have read."""
    max_cache_bytes: str = "2GiB"
    """Memory for the cache of each replica."""
    device: str | None = None
    dtype: str | None = None
    cpus: float = Field(1.0, gt=0)
    """Cores that Ray reserves for each replica; as many threads compute."""
    gpus: float = Field(0.0, ge=0)
    policy: str = RouterSettings.policy
    """``content``, ``beginning`` or ``round-robin``: see kvboost route --help."""
    remember: int = RouterSettings.remember_tokens
    """Tokens of text to remember for each replica; best as many as its cache holds."""
    shared_cache: bool = False
    """Whether API keys share cached text. Keys come from KVBOOST_API_KEYS."""
    max_ongoing: int = Field(64, ge=1)
    """Requests that a replica has at once, waiting ones included; more wait in the front."""
    drain_seconds: float = Field(30.0, ge=0)
    """Seconds that running answers get when a replica stops."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            said = f"max_replicas={self.max_replicas} must be at least replicas={self.replicas}"
            raise ValueError(said)
        RouterSettings(self.policy, self.remember)
        return self
