"""Look at a page in a real browser."""

from collections.abc import Callable

from selenium.webdriver import ActionChains
from selenium.webdriver.chromium.webdriver import ChromiumDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

HOSTILE = (
    "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1>"
    "<b onmouseover=window.hacked=1>&amp;"
)


def text(browser: WebDriver, selector: str) -> str:
    """Return the visible text of an element."""
    return browser.find_element(By.CSS_SELECTOR, selector).text


def texts(browser: WebDriver, selector: str) -> list[str]:
    """Return the text content of all elements, visible or not."""
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
        selector,
    )
    return found


def press(browser: WebDriver, *keys: str) -> None:
    """Press keys on the focused element."""
    ActionChains(browser).send_keys(*keys).perform()


def press_tab_until(
    browser: WebDriver, is_reached: Callable[[WebElement], bool], limit: int = 60
) -> WebElement:
    """Press Tab until `is_reached` accepts the focused element, and return that element."""
    for _ in range(limit):
        ActionChains(browser).send_keys("\ue004").perform()
        element = browser.switch_to.active_element
        if is_reached(element):
            return element
    raise AssertionError(f"not reached by pressing Tab {limit} times")


def too_wide(browser: WebDriver) -> int:
    """Return by how many pixels the page is wider than the window."""
    pixels: int = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels


def overlapping(browser: WebDriver) -> list[list[str]]:
    """Return pairs of texts in drawings that overlap each other."""
    pairs: list[list[str]] = browser.execute_script("""
        const texts = [...document.querySelectorAll("svg text")]
            .map((e) => [e.textContent, e.getBoundingClientRect()]);
        const overlap = (a, b) => a.width && b.width
            && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;
        return texts.flatMap(([t, a], i) =>
            texts.slice(i + 1).filter(([, b]) => overlap(a, b)).map(([u]) => [t, u]));""")
    return pairs


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors like "#1c2126", as WCAG defines it."""
    luminances = []
    for color in (one, other):
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in channels
        ]
        luminances.append(
            0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05
        )
    return max(luminances) / min(luminances)


def set_screen(
    browser: ChromiumDriver, width: int = 1280, dark: bool = False, media: str = ""
) -> None:
    """Emulate a screen: its width in pixels, its color scheme, and "print" for paper."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": media, "features": [scheme]}
    )
