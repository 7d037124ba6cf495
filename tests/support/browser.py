"""A real browser, and what is asked of every page in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

OpenPage = Callable[..., "Page"]
_CHROMIUM = shutil.which("chromium")
MISSING = None if _CHROMIUM else "chromium is not installed: make services"
expect: Any = None
try:
    from playwright.sync_api import expect
except ImportError:
    MISSING = "playwright is not installed: pip install -e '.[dev]'"
else:
    expect.set_options(timeout=60_000)  # for a busy machine


@contextmanager
def open_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=quiet)
        yield browser
        browser.close()


def ask(
    page: Page,
    documents: str,
    question: str = "Why?",
    *,
    max_tokens: int = 8,
    button: str = "Ask",
    continues: bool = False,
) -> None:
    """Asks in the form, in a new conversation unless it ``continues``, and waits for the answer.
    Buttons are pressed by the keyboard: one that moves between a mouse's press and its release is
    not clicked, and the page moves while it shows what arrives."""
    open_settings(page)
    if not continues and page.locator("#new").is_visible():
        page.get_by_role("button", name="New", exact=True).press("Enter")
    page.get_by_label("Documents").fill(documents)
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name=button, exact=True).press("Enter")
    answered(page)
    error = page.locator("#ask-error")
    assert not error.is_visible(), error.inner_text()


def open_settings(page: Page) -> None:
    if not page.get_by_label("Documents").is_visible():
        page.get_by_text("Documents and settings").click()


def answered(page: Page) -> None:
    """Waits until no request runs."""
    page.locator("#stop").wait_for(state="hidden")


def rows(page: Page) -> dict[str, int]:
    """How many tokens of each source the report shows."""
    shown = page.locator("#report .term:has(.amount)").all()
    return {
        line.locator("b").inner_text(): int(line.locator(".amount").inner_text().replace(",", ""))
        for line in shown
    }


def small_targets(page: Page, least: int = 40) -> list[str]:
    """Visible controls that a finger could miss. Links within a text and parts of the prompt flow
    with it."""
    found: list[str] = page.evaluate(
        """(least) => [...document.querySelectorAll("button, input, textarea, select, summary, a")]
          .filter((node) => node.checkVisibility() && !node.closest(".answer p, .skip"))
          .map((node) => node.matches(".modes input") ? node.nextElementSibling : node)
          .map((node) => [node.getBoundingClientRect(), node])
          .filter(([box]) => box.width < least || box.height < least)
          .map(([box, node]) => `${box.width} x ${box.height} ${node.outerHTML.slice(0, 90)}`)""",
        least,
    )
    return found


def unnamed_controls(page: Page) -> list[str]:
    """Controls that a screen reader could not call anything."""
    names: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, [tabindex='0'], a")]
          .filter((node) => node.checkVisibility())
          .filter((node) => !(node.labels?.length || node.textContent.trim()
            || node.getAttribute("aria-label")))
          .map((node) => node.outerHTML.slice(0, 120))"""
    )
    return names


def faint_texts(page: Page, least: float = 4.5) -> list[str]:
    """Visible texts whose contrast with what is painted behind them is below ``least``. Disabled
    buttons may be faint."""
    faint: list[str] = page.evaluate(_FAINT, least)
    return faint


_FAINT = """(least) => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return { rgb: [r, g, b], alpha: a / 255 };
  };
  const over = ({ rgb, alpha }, below) =>
    rgb.map((one, i) => one * alpha + below[i] * (1 - alpha));
  const behind = (node) => {
    const below = node.parentElement ? behind(node.parentElement) : [255, 255, 255];
    return over(rgba(getComputedStyle(node).backgroundColor), below);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility()) continue;
    if (node.closest(".skip, noscript, :disabled, [aria-disabled=true]")) continue;
    const style = getComputedStyle(node);
    const background = behind(node);
    const colour = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const ink = over(rgba(colour), background);
    const [low, high] = [light(ink), light(background)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return found;
}"""


def ask_alone(page: Page, question: str = "Why?") -> Locator:
    """Asks without documents; returns the turn."""
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")
    answered(page)
    return page.locator(".turn").last
