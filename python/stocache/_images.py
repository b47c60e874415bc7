"""What is kept of a PIL image beside its pixels: how they are to be shown."""

from __future__ import annotations

from typing import Any

# What shines through, which way up, in which colours. Formats keep these under several names.
_KEPT = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp", "icc_profile")
_ORIENTATION = 0x0112


def kept_info(image: Any) -> dict[str, Any] | None:
    """The part of ``image.info`` that is stored; the image must be loaded."""
    info = image.info
    if not isinstance(info, dict):  # a program's own
        return None
    kept = {"transparency": info["transparency"]} if "transparency" in info else {}
    for key in _KEPT:
        value = info.get(key)
        if isinstance(value, str):
            kept[key] = str(value)  # of a text in a PNG file, which knows its language
        elif isinstance(value, bytes):
            kept[key] = value
    # What getexif() has handed out may have been changed since; TIFF files have it in their tags.
    if getattr(image, "_exif", None) is not None or hasattr(image, "tag_v2"):
        exif = image.getexif()
        before = type(exif)()
        before.load(kept.get("exif"))
        if exif.get(_ORIENTATION, 1) != before.get(_ORIENTATION, 1):
            before[_ORIENTATION] = exif.get(_ORIENTATION, 1)
            kept["exif"] = before.tobytes()
    return kept or None
