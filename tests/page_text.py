"""The text of a page whose tags are all closed in order."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "circle", "path", "br", "input"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def text_of(page: str) -> str:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return " ".join("".join(parser.text).split())
