"""Why an image cannot be pulled, converted or run."""

from __future__ import annotations

from recipes.errors import RecipeError


class ImageError(RecipeError):
    """The failure of one image; failures are counted by `cause`, one word such as "missing" or "access"."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail
