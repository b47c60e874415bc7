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
    if "exif" not in kept and hasattr(image, "tag_v2"):  # TIFF files have it among their tags
        exif = image.getexif()
        if exif.get(_ORIENTATION, 1) != 1:
            alone = type(exif)()
            alone[_ORIENTATION] = exif[_ORIENTATION]
            kept["exif"] = alone.tobytes()
    return kept or None
