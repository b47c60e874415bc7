"""Arrays of numpy that are more than numbers in plain memory."""

from __future__ import annotations

from typing import Any

from stocache._types.registry import complete, register_type

_NOT_SAID = object()


def _numpy() -> Any:
    import numpy

    return numpy


def _array_parts(array: Any) -> Any:
    """Of those that the codec leaves over: records, texts of any length (numpy 2), and those whose
    type has something noted in it, as h5py does for enums and texts."""
    if array.dtype.kind == "T":
        return NotImplemented if array.dtype.metadata else _text_parts(array)
    noted = array.dtype.metadata is not None
    if (noted or array.dtype.kind == "V") and not array.dtype.hasobject:
        return _typed_parts(array)
    return NotImplemented


def _array(kind: str, *parts: Any) -> Any:
    return _typed(*parts) if kind == "typed" else _texts(*parts)


# Arrays of which the type is described


def _typed_parts(array: Any) -> Any:
    np = _numpy()
    described = _described(array.dtype)
    again = _dtype(described)
    if again != array.dtype or _described(again) != described:
        return NotImplemented  # of somebody else's making
    octets = np.frombuffer(array.tobytes(), np.uint8)
    return "typed", described, array.shape, octets


def _typed(described: Any, shape: tuple[int, ...], octets: Any) -> Any:
    dtype = _dtype(described)
    if dtype.hasobject or dtype.kind == "T":  # its bytes would be taken for addresses
        raise ValueError(f"an array of {dtype} out of bytes")
    return _numpy().ndarray(shape, dtype, octets)


def _described(dtype: Any) -> Any:
    """A dtype as numpy takes it, but for those inside it and for what is noted in it."""
    if dtype.metadata is not None:
        return [_described_plainly(dtype), dict(dtype.metadata)]
    return _described_plainly(dtype)


def _described_plainly(dtype: Any) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return (_described(base), shape)
    if dtype.names is None:
        # The code, because long and long long are two types with one `str`.
        return dtype.str if dtype.kind in "mMSUV" else dtype.byteorder + dtype.char
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_described(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is _numpy().record,
    }


def _dtype(described: Any) -> Any:
    np = _numpy()
    if isinstance(described, list):
        plain, noted = described
        return np.dtype(_dtype(plain), metadata=noted)
    if isinstance(described, tuple):
        return np.dtype((_dtype(described[0]), described[1]))
    if isinstance(described, str):
        return np.dtype(described)
    fields = {**described, "formats": [_dtype(inner) for inner in described["formats"]]}
    aligned, record = fields.pop("aligned"), fields.pop("record")
    if not any(fields["titles"]):
        del fields["titles"]
    dtype = np.dtype(fields, align=aligned)
    return np.dtype((np.record, dtype)) if record else dtype


# Texts


def joined(texts: list[str | None]) -> tuple[Any, str]:
    """How long they are, -1 where one is missing; and all of them in one."""
    lengths = [-1 if text is None else len(text) for text in texts]
    return _numpy().array(lengths, "i8"), "".join(filter(None, texts))


def separated(lengths: Any, together: str, missing: Any) -> list[Any]:
    """The texts again."""
    texts, at = [], 0
    for length in lengths.tolist():
        texts.append(missing if length == -1 else together[at : at + length])
        at += max(0, length)
        if length < -1 or at > len(together):
            raise ValueError(f"texts of {length} of {len(together)} characters")
    return texts


def _text_parts(array: Any) -> tuple[Any, ...]:
    missing = getattr(array.dtype, "na_object", _NOT_SAID)
    if not (missing in (_NOT_SAID, None) or isinstance(missing, (float, str))):
        raise TypeError(f"na_object is {missing!r}; None, a float or a str is stored")
    texts = [None if _is_missing(text, missing) else str(text) for text in array.ravel().tolist()]
    said = () if missing is _NOT_SAID else (missing,)
    return "texts", said, bool(array.dtype.coerce), array.shape, *joined(texts)


def _is_missing(text: Any, missing: Any) -> bool:
    return text is missing or (text != text and missing != missing)


def _texts(
    said: tuple[Any, ...], coerce: bool, shape: tuple[int, ...], lengths: Any, together: str
) -> Any:
    np = _numpy()
    options = {"na_object": said[0]} if said else {}
    texts = separated(lengths, together, said[0] if said else None)
    return np.array(texts, np.dtypes.StringDType(coerce=coerce, **options)).reshape(shape)


# Subclasses of ndarray. Attributes that somebody has given to one are not stored, nor then is it.


def _has_attributes(value: Any) -> bool:
    """Beside those that numpy itself keeps there."""
    return not all(name.startswith("_") for name in vars(value))


def _as_array(value: Any) -> Any:
    return NotImplemented if _has_attributes(value) else (value.view(_numpy().ndarray),)


def _rec_array_parts(value: Any) -> Any:
    np = _numpy()
    if _has_attributes(value):
        return NotImplemented
    plain = value.view(np.ndarray)
    return (plain.view(np.dtype((np.void, plain.dtype))) if plain.dtype.names else plain,)


def _masked_parts(value: Any) -> Any:
    np = _numpy()
    if value.baseclass is not np.ndarray or _has_attributes(value):
        return NotImplemented
    mask = None if value.mask is np.ma.nomask else np.asarray(value.mask)
    # One that was not set follows from the type, also of what is computed with the array. An array
    # that is asked for it keeps it.
    fill_value = vars(value).get("_fill_value")
    fill_value = None if fill_value is None else np.asarray(fill_value)
    return value.data, mask, fill_value, value.hardmask


def _masked(data: Any, mask: Any, fill_value: Any, hard: bool) -> Any:
    np = _numpy()
    mask = np.ma.nomask if mask is None else mask
    return np.ma.MaskedArray(data, mask, fill_value=fill_value, hard_mask=hard)


def _scalar_parts(value: Any) -> Any:
    """Of records: as an array without dimensions."""
    if value.dtype.hasobject:
        return NotImplemented
    return (_numpy().array(value, value.dtype),)


complete("numpy.ndarray", _array_parts, _array)
complete("numpy.memmap", _array_parts, _array)  # which comes back as an array, as all of them do
register_type("numpy.matrix", _as_array, lambda array: array.view(_numpy().matrix))
register_type("numpy.recarray", _rec_array_parts, lambda array: array.view(_numpy().recarray))
register_type("numpy.ma.MaskedArray", _masked_parts, _masked)
register_type("numpy.void", _scalar_parts, lambda array: array[()])
register_type("numpy.record", _scalar_parts, lambda array: array[()])
register_type("numpy.dtypes.VoidDType", lambda dtype: (_described(dtype),), _dtype)
