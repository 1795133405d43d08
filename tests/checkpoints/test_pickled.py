"""PyTorch's files: every dtype and layout is read rightly, nothing in them runs, and no size in them is believed."""

import mlx_specdec  # noqa: F401  # isort: skip

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints.pickled import read_pickled
from mlx_specdec.errors import CheckpointError
from tests.checkpoints.torch_files import (
    call,
    name,
    parameter,
    save,
    several,
    state_dict,
    storage,
    tensor,
    text,
    whole,
    write,
)

NUMBERS = np.arange(12, dtype="<f4")


def one(path: Path, value: bytes, data: bytes = NUMBERS.tobytes()) -> Path:
    """A file with one tensor, `value`, over one storage."""
    return write(path / "model.bin", state_dict({"w": value}), {"0": data})


# --- what is read


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "b1"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    array = (np.arange(12) % 5).astype(dtype).reshape(3, 4)
    read = read_pickled(save(tmp_path / "model.bin", {"w": array}))["w"]
    assert read.shape == (3, 4)
    assert str(read.dtype).split(".")[-1] == {"f8": "float32"}.get(dtype, str(array.dtype))
    np.testing.assert_array_equal(np.array(read), array)


def test_bfloat16(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], dtype="<u2")
    file = one(tmp_path, tensor("BFloat16Storage", "0", 4, (2, 2), (2, 1)), bits.tobytes())
    read = read_pickled(file)["w"]
    assert read.dtype == mx.bfloat16
    assert mx.array_equal(read.view(mx.uint16).reshape(-1), mx.array(bits))


def test_eight_bit_floats_become_what_they_stand_for(tmp_path: Path) -> None:
    value = call(
        name("torch._utils", "_rebuild_tensor_v3"),
        storage(name("torch.storage", "UntypedStorage"), "0", 4),
        whole(0), several(whole(4)), several(whole(1)), b"\x89", call(name("collections", "OrderedDict")),
        name("torch", "float8_e4m3fn"),
    )  # fmt: skip
    read = read_pickled(one(tmp_path, value, bytes([0x38, 0x40, 0xB8, 0x7E])))["w"]
    assert read.dtype == mx.bfloat16
    assert read.tolist() == [1.0, 2.0, -1.0, 448.0]


def test_layouts(tmp_path: Path) -> None:
    tensors = {
        "whole": tensor("FloatStorage", "0", 12, (3, 4), (4, 1)),
        "transposed": tensor("FloatStorage", "0", 12, (4, 3), (1, 4)),
        "part": tensor("FloatStorage", "0", 12, (2, 2), (4, 1), offset=6),
        "one": tensor("FloatStorage", "0", 12, (), (), offset=5),
        "none": tensor("FloatStorage", "0", 12, (0, 4), (4, 1)),
        "parameter": parameter(tensor("FloatStorage", "0", 12, (12,), (1,))),
        "size": call(
            name("torch._utils", "_rebuild_tensor_v2"), storage(name("torch", "FloatStorage"), "0", 12), whole(0),
            call(name("torch", "Size"), several(whole(12))), several(whole(1)), b"\x89", b"}",
        ),
    }  # fmt: skip
    read = read_pickled(write(tmp_path / "m.bin", state_dict(tensors), {"0": NUMBERS.tobytes()}))
    table = NUMBERS.reshape(3, 4)
    expected = [table, table.T, table[1:, 2:], NUMBERS[5], np.zeros((0, 4)), NUMBERS, NUMBERS]
    assert list(read) == list(tensors)
    for got, want in zip(read.values(), expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(np.array(got), want)


def test_newer_protocols_and_repeated_names(tmp_path: Path) -> None:
    """Names off the stack, memoized, and framed."""
    rebuild = text("torch._utils") + text("_rebuild_tensor_v2") + b"\x93\x94"
    kind = text("torch") + text("FloatStorage") + b"\x93\x94"
    hooks = text("collections") + text("OrderedDict") + b"\x93\x94)R"

    def made(rebuild: bytes, kind: bytes, hooks: bytes) -> bytes:
        sizes = (whole(0), several(whole(12)), whole(1) + b"\x85", b"\x89", hooks)
        return rebuild + several(storage(kind, "0", 12), *sizes) + b"R"

    program = b"\x80\x04\x95" + (0).to_bytes(8, "little") + b"}\x94("
    program += text("a") + made(rebuild, kind, hooks) + text("b") + made(b"h\x01", b"h\x02", b"h\x03)R") + b"u."
    read = read_pickled(write(tmp_path / "m.pt", program, {"0": NUMBERS.tobytes()}, byteorder=None, folder="other"))
    assert mx.array_equal(read["a"], mx.array(NUMBERS))
    assert mx.array_equal(read["b"], mx.array(NUMBERS))


# --- what is not run


def attempts(marker: Path) -> dict[str, bytes]:
    """Programs that make a folder `marker` when Python's unpickler runs them."""
    target = text(str(marker))
    off_the_stack = text("os") + text("mkdir") + b"\x93"
    return {
        "as the value": call(name("os", "mkdir"), target),
        "named on the stack": off_the_stack + several(target) + b"R",
        "the old way": b"(" + target + b"ios\nmkdir\n",
        "as an object": b"(" + name("os", "mkdir") + target + b"o",
        "by evaluation": call(name("builtins", "eval"), text(f"__import__('os').mkdir({str(marker)!r})")),
        "in a storage": storage(call(name("os", "mkdir"), target), "0", 12),
        "as a hook": call(
            name("torch._utils", "_rebuild_tensor_v2"), storage(name("torch", "FloatStorage"), "0", 12), whole(0),
            several(whole(12)), several(whole(1)), b"\x89", call(name("os", "mkdir"), target),
        ),
    }  # fmt: skip


WAYS = list(attempts(Path("x")))
RUNS = [way for way in WAYS if way not in ("in a storage", "as a hook")]  # those two need PyTorch to be there


@pytest.mark.parametrize("way", WAYS)
def test_code_does_not_run(way: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    file = one(tmp_path, attempts(marker)[way])
    with pytest.raises(CheckpointError) as error:
        read_pickled(file)
    assert not marker.exists()
    said = str(error.value)
    assert str(file) in said
    assert "mkdir" in said or "eval" in said or "opcode INST" in said
    assert "\n" not in said


@pytest.mark.parametrize("way", RUNS)
def test_that_code_would_have_run(way: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(b"\x80\x04" + attempts(marker)[way] + b".")
    assert marker.exists()


OTHERS = {
    "numpy.core.multiarray.scalar": call(name("numpy.core.multiarray", "scalar")),
    "torch.nn.modules.linear.Linear": call(name("torch.nn.modules.linear", "Linear")),
    "torch.load": call(name("torch", "load"), text("x")),
    "torch._utils._rebuild_tensor": name("torch._utils", "_rebuild_tensor"),
    "collections.OrderedDict.update": name("collections", "OrderedDict.update"),
}


@pytest.mark.parametrize("named", OTHERS)
def test_every_other_name_is_refused_by_its_name(named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"asks for '{named}' to be run, and only tensors are read"):
        read_pickled(one(tmp_path, OTHERS[named]))


# --- what is no tensor


NOT_TENSORS = {
    "a number": whole(3),
    "a dict": b"}",
    "a name": name("torch", "FloatStorage"),
    "a call of a storage": call(name("torch", "FloatStorage"), whole(4)),
    "no arguments": call(name("torch._utils", "_rebuild_tensor_v2")),
    "an empty parameter": call(name("torch._utils", "_rebuild_parameter")),
    "a storage that is none": call(name("torch._utils", "_rebuild_tensor_v2"), *[whole(1)] * 6),
    "an unknown storage": tensor("float32", "0", 12, (12,), (1,)),
    "a dict with other keys": b"}" + whole(1) + whole(1) + b"s",
    "a call of what was called": call(call(name("collections", "OrderedDict"))),
    "attributes of a tensor": tensor("FloatStorage", "0", 12, (12,), (1,)) + b"}b",
    "an extension": b"\x82\x01",
    "a new object": name("collections", "OrderedDict") + b")\x81",
    "something never held": b"h\x09",
    "more than there is": b"\x87",
    "a far memory": b"}r\xff\xff\xff\xff",
}


@pytest.mark.parametrize("what", NOT_TENSORS)
def test_what_is_no_tensor_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pickled(one(tmp_path, NOT_TENSORS[what]))


@pytest.mark.parametrize(
    "program", [b"", b".", b"\x80\x02}", b"\x80\x02].", b"\x80\x02K\x01.", b"\xff\xfe", b"X\xff\xff\xff\x7f"]
)
def test_programs_that_hold_no_dict(program: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pickled(write(tmp_path / "m.bin", program, {}))


# --- sizes that are not so


BEYOND = {
    "one row too many": tensor("FloatStorage", "0", 12, (4, 4), (4, 1)),
    "an offset": tensor("FloatStorage", "0", 12, (3, 4), (4, 1), offset=1),
    "an offset far away": tensor("FloatStorage", "0", 12, (1,), (1,), offset=1 << 40),
    "a stride": tensor("FloatStorage", "0", 12, (3, 4), (5, 1)),
    "the same number again and again": tensor("FloatStorage", "0", 12, (1 << 30,), (0,)),
    "a product beyond 64 bits": tensor("FloatStorage", "0", 12, (1 << 30, 1 << 30, 1 << 30), (0, 0, 0)),
    "a size beyond 64 bits": tensor("FloatStorage", "0", 12, (1 << 70,), (1,)),
    "a size below 0": tensor("FloatStorage", "0", 12, (-1,), (1,)),
    "a stride below 0": tensor("FloatStorage", "0", 12, (3,), (-1,), offset=4),
    "an offset below 0": tensor("FloatStorage", "0", 12, (3,), (1,), offset=-4),
    "more sizes than strides": tensor("FloatStorage", "0", 12, (3, 4), (1,)),
    "very many sizes": tensor("FloatStorage", "0", 12, (1,) * 99, (1,) * 99),
    "a storage of more numbers": tensor("FloatStorage", "0", 1 << 40, (3,), (1,)),
    "a storage of fewer numbers": tensor("FloatStorage", "0", 11, (3,), (1,)),
    "a storage of wider numbers": tensor("DoubleStorage", "0", 12, (3,), (1,)),
    "a storage that is missing": tensor("FloatStorage", "1", 12, (3,), (1,)),
    "a storage elsewhere": tensor("FloatStorage", "../../../../etc/passwd", 12, (3,), (1,)),
    "a storage of the folder": tensor("FloatStorage", "/etc/passwd", 12, (3,), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("what", BEYOND)
def test_sizes_are_compared_with_what_is_there(what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        read_pickled(one(tmp_path, BEYOND[what]))
    assert "storage" in str(error.value) or "size" in str(error.value)


def test_very_many_views_of_a_storage(tmp_path: Path) -> None:
    tensors = {str(i): tensor("FloatStorage", "0", 4096, (2048,), (1,), offset=i) for i in range(2000)}
    file = write(tmp_path / "m.bin", state_dict(tensors), {"0": bytes(4 * 4096)})
    with pytest.raises(CheckpointError, match="its tensors take 16384000 bytes, and the file has"):
        read_pickled(file)


def test_very_many_names_of_a_tensor_are_one_array(tmp_path: Path) -> None:
    tensors = {str(i): tensor("FloatStorage", "0", 12, (12,), (1,)) for i in range(500)}
    read = read_pickled(write(tmp_path / "m.bin", state_dict(tensors), {"0": NUMBERS.tobytes()}))
    assert len({id(x) for x in read.values()}) == 1


# --- archives that are not so


GOOD = state_dict({"w": tensor("FloatStorage", "0", 12, (12,), (1,))})


def compressed(path: Path) -> None:
    write(path, GOOD, {"0": bytes(48)}, compression=zipfile.ZIP_DEFLATED)


def bomb(path: Path) -> None:
    program = state_dict({"w": tensor("FloatStorage", "0", 1 << 26, (1 << 26,), (1,))})
    write(path, program, {"0": bytes(1 << 28)}, compression=zipfile.ZIP_DEFLATED)


def larger_than_it_is(path: Path) -> None:
    """The directory says that the storage has a gigabyte."""
    write(path, state_dict({"w": tensor("FloatStorage", "0", 1 << 28, (1 << 28,), (1,))}), {"0": bytes(48)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"archive/data/0") - 46
    data[entry + 20 : entry + 28] = (1 << 30).to_bytes(4, "little") * 2
    path.write_bytes(data)


def overlapping(path: Path) -> None:
    """Two hundred names in the directory for the same bytes."""
    write(path, GOOD, {str(i): b"" for i in range(200)} | {"200": bytes(1 << 16)})
    data = bytearray(path.read_bytes())
    last = data.rindex(b"archive/data/200") - 46
    for i in range(200):
        entry = data.rindex(f"archive/data/{i}PK".encode()) - 46
        data[entry + 16 : entry + 28] = data[last + 16 : last + 28]
    path.write_bytes(data)


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", GOOD)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", GOOD)


def two_programs(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", GOOD)
        archive.writestr("b/data.pkl", GOOD)


def flipped(path: Path) -> None:
    write(path, GOOD, {"0": NUMBERS.tobytes()})
    data = bytearray(path.read_bytes())
    data[data.index(NUMBERS.tobytes()) + 9] ^= 1
    path.write_bytes(data)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (compressed, "is compressed, which PyTorch never does"),
    "a bomb": (bomb, "is compressed, which PyTorch never does"),
    "larger than it is": (larger_than_it_is, "larger than the file"),
    "overlapping": (overlapping, "larger than the file"),
    "twice": (twice, "two members of one name"),
    "two programs": (two_programs, "no data.pkl, which names the tensors, or several"),
    "no program": (lambda p: zipfile.ZipFile(p, "w").close(), "no data.pkl"),
    "a flipped bit": (flipped, "Bad CRC-32"),
    "big-endian": (lambda p: write(p, GOOD, {"0": bytes(48)}, byteorder="big"), "in the other order"),
    "a long program": (lambda p: write(p, b"N" * (5 << 20), {}), "more than any tensors' names take"),
    "before 1.6": (
        lambda p: p.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."),
        "PyTorch's format from before version 1.6",
    ),
    "text": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "no file of PyTorch's"),
    "nothing": (lambda p: p.write_bytes(b""), "no file of PyTorch's"),
    "missing": (lambda p: None, "No such file"),
}


@pytest.mark.parametrize("what", WRONG)
def test_archives_that_are_not_so(what: str, tmp_path: Path) -> None:
    make, said = WRONG[what]
    file = tmp_path / "pytorch_model.bin"
    make(file)
    with pytest.raises(CheckpointError, match=said) as error:
        read_pickled(file)
    assert str(error.value).startswith(f"{file} cannot be read")


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole_file = save(tmp_path / "whole.bin", {"w": NUMBERS.reshape(3, 4)}).read_bytes()
    cut = tmp_path / "cut.bin"
    for length in range(0, len(whole_file) - 1, 7):
        cut.write_bytes(whole_file[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_pickled(cut)


def test_damaged_anywhere(tmp_path: Path) -> None:
    """A wrong byte is said or does not matter; it never gives another kind of error or other numbers."""
    whole_file = save(tmp_path / "whole.bin", {"w": NUMBERS.reshape(3, 4)}).read_bytes()
    damaged = tmp_path / "damaged.bin"
    for place in range(len(whole_file)):
        damaged.write_bytes(whole_file[:place] + bytes([whole_file[place] ^ 0x41]) + whole_file[place + 1 :])
        try:
            read = read_pickled(damaged)
        except CheckpointError:
            continue
        assert mx.array_equal(read["w"], mx.array(NUMBERS.reshape(3, 4))), place
