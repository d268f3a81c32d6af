"""Looking at a page in a real browser."""

from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

HOSTILE = "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1><b onmouseover=window.hacked=1>&amp;"


def text(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector).text


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def too_wide(browser):
    return browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


def overlapping(browser):
    """Words in the drawings that lie on each other."""
    return browser.execute_script("""
        const words = [...document.querySelectorAll("svg text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
        const meet = (a, b) => a.width && b.width && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;
        return words.flatMap(([t, a], i) => words.slice(i + 1).filter(([, b]) => meet(a, b)).map(([u]) => [t, u]));""")


def contrast(one, other):
    lights = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(lights) / min(lights)


def set_screen(browser, width=1280, dark=False, media=""):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
