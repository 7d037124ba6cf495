"""A real browser, and what is asked of every page in it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_CHROMIUM = shutil.which("chromium")

MISSING = None
if importlib.util.find_spec("playwright") is None:
    MISSING = "playwright is not installed: pip install -e '.[dev]'"
elif _CHROMIUM is None:
    MISSING = "chromium is not installed: make services"


@contextmanager
def open_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=quiet)
        yield browser
        browser.close()


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
