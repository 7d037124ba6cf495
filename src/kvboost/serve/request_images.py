"""Images in messages: OpenAI's parts, and what those of other APIs become."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from kvboost.serve.request_fields import Body, BodyContext, Text
from kvboost.serve.request_marks import Marked

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.ASCII | re.IGNORECASE)
_SHOWN = 40


def refuse_unseen(kind: Any, info: ValidationInfo) -> Any:
    """Refuses images that the model cannot be given."""
    if isinstance(info.context, BodyContext) and not info.context.takes_images:
        raise PydanticCustomError(
            "unsupported", "images are not supported by this server; send parts of type 'text'"
        )
    return kind


def _as_data(url: str) -> str:
    """Refuses what is no data URL: this server fetches nothing for strangers."""
    if _DATA_URL.match(url) is None:
        raise PydanticCustomError(
            "unsupported",
            "must be a data URL like 'data:image/png;base64,...', not {shown}: this server fetches "
            "no addresses",
            {"shown": repr(url[:_SHOWN])},
        )
    return url


DataUrl = Annotated[Text, AfterValidator(_as_data)]
Detail = Literal["auto", "low", "high", "original"]
"""Changes nothing: the model's own image processor decides how an image is scaled."""


class ImageAddress(Body):
    url: DataUrl
    detail: Detail | None = None


class ImagePart(Marked):
    """A part with an image of a message."""

    type: Annotated[Literal["image_url"], BeforeValidator(refuse_unseen)]
    image_url: ImageAddress

    @classmethod
    def of(cls, url: str) -> ImagePart:
        """A part of an image whose address has been checked."""
        address = ImageAddress.model_construct(url=url)
        return cls.model_construct(type="image_url", image_url=address)

    def for_template(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}
