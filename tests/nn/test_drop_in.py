"""unfading.nn.LSTM, GRU and RNN are torch.nn's layers: the same numbers, states, names and errors, from our kernels."""

import copy
import io
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close

import unfading
from unfading.backends.choose import observe_backends

T, B, I, H = 5, 4, 3, 6
KINDS = ["LSTM", "GRU", "RNN"]
# float64: rounding in another order. float32: as torch.nn to 1e-6; gradients are sums over T B terms.
TOLERANCE = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-6, 1e-5)}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def variants():
    """Every combination of the options of a constructor that change what is computed."""
    for kind, layers, bias, both in product(KINDS, (1, 2), (True, False), (False, True)):
        options = {"num_layers": layers, "bias": bias, "bidirectional": both}
        more = {"LSTM": [{}, {"proj_size": 2}], "GRU": [{}], "RNN": [{"nonlinearity": "tanh"}, {"nonlinearity": "relu"}]}
        for own in more[kind]:
            marks = [] if both == (layers == 2) and bias != both else pytest.mark.long
            yield pytest.param(kind, {**options, **own}, marks=marks, id=f"{kind} {options | own}")


def pair(kind="LSTM", dtype=torch.float64, **options):
    """torch.nn's layer, and ours with its weights."""
    theirs = getattr(nn, kind)(I, H, dtype=dtype, **options)
    ours = getattr(unfading.nn, kind)(I, H, dtype=dtype, **options)
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def random_state(layer, *, batch=(B,)):
    """A state that needs a gradient."""
    front = (layer.num_layers * (2 if layer.bidirectional else 1), *batch)
    parts = [torch.randn(*front, layer.proj_size or H), torch.randn(*front, H)][: 2 if layer.mode == "LSTM" else 1]
    parts = [part.to(layer.weight_ih_l0.dtype).requires_grad_() for part in parts]
    return tuple(parts) if layer.mode == "LSTM" else parts[0]


def results(layer, x, hx):
    """The output and the state, then the gradients of the input, the state and the parameters."""
    x = x.detach().requires_grad_()
    output, state = layer(x, hx)
    parts = [output, *(state if isinstance(state, tuple) else [state])]
    given = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    loss = sum((part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).reshape(part.shape)).sum() for part in parts)
    return parts, torch.autograd.grad(loss, [x, *given, *layer.parameters()])


@pytest.mark.parametrize(("kind", "options"), list(variants()))
@pytest.mark.sample(4)
def test_every_combination_of_options_gives_the_numbers_of_torch(kind, options):
    for dtype, batch_first, stateful in ((torch.float64, True, False), (torch.float32, False, True)):
        theirs, ours = pair(kind, dtype, batch_first=batch_first, **options)
        x = torch.randn((B, T, I) if batch_first else (T, B, I), dtype=dtype)
        hx = random_state(theirs) if stateful else None
        with observe_backends() as ran:
            got = results(ours, x, hx)
        assert {each["backend"] for each in ran.values()} == {"fused"}
        want, exact = results(theirs, x, hx), TOLERANCE[dtype]
        for mine, their, tolerance in zip(got, want, exact, strict=True):
            assert_close(mine, their, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.sample(3)
def test_unbatched_and_packed_sequences_have_the_form_of_torch(kind, given):
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    x = torch.randn(T, B, I, dtype=torch.float64)
    hx = random_state(theirs, batch=()) if given else None
    assert_close(ours(x[:, 0], hx), theirs(x[:, 0], hx))
    hx = random_state(theirs) if given else None
    for lengths, ordered in (([5, 3, 3, 1], True), ([2, 5, 1, 4], False)):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=ordered)
        (got, state), (want, expected) = ours(packed, hx), theirs(packed, hx)
        assert_close(got.data, want.data)
        assert_close(state, expected)
        assert torch.equal(got.batch_sizes, want.batch_sizes)
        assert (got.sorted_indices is None) == ordered


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_attributes_names_and_types_are_those_of_torch(kind):
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    assert isinstance(ours, getattr(nn, kind))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [len(each) for each in ours.all_weights] == [len(each) for each in theirs.all_weights]
    assert [each.shape for each in ours._flat_weights] == [each.shape for each in theirs._flat_weights]
    ours.flatten_parameters()
    x = torch.randn(T, B, I, dtype=torch.float64)
    assert type(ours(x)[1]) is type(theirs(x)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_initial_values(kind):
    weights = []
    for package in (nn, unfading.nn):
        torch.manual_seed(7)
        layer = getattr(package, kind)(I, H, 2)
        layer.reset_parameters()
        weights.append(layer.state_dict())
    assert_close(*weights, rtol=0, atol=0)


def test_arguments_are_positional_as_in_torch():
    assert unfading.nn.RNN(I, H, 1, "relu").nonlinearity == "relu"
    assert unfading.nn.LSTM(I, H, 2, False, True, 0.5, True, 2).proj_size == 2


@pytest.mark.parametrize("options", [{"nonlinearity": "sin"}, {"num_layers": 0}, {"dropout": 2.0}, {"proj_size": 2}], ids=str)
def test_a_wrong_option_is_the_error_of_torch(options):
    messages = []
    for package in (nn, unfading.nn):
        with pytest.raises(ValueError) as error:
            package.RNN(I, H, **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


WRONG = {
    "features": (torch.zeros(T, B, I + 1),),
    "axes": (torch.zeros(T),),
    "dtype": (torch.zeros(T, B, I).double(),),
    "no steps": (torch.zeros(0, B, I),),
    "batch of the state": (torch.zeros(T, B, I), torch.zeros(1, B + 1, H)),
    "layers of the state": (torch.zeros(T, B, I), torch.zeros(2, B, H)),
    "axes of the state": (torch.zeros(T, I), torch.zeros(1, 1, H)),
    "a string": ("x",),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_call_is_the_error_of_torch(kind, what):
    x, *hx = WRONG[what]
    errors = []
    for layer in pair(kind, torch.float32):
        with pytest.raises(Exception) as error:
            layer(x, *((each, each) if kind == "LSTM" else each for each in hx))
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_a_batch_without_rows_is_a_result_as_in_torch():
    theirs, ours = pair()
    x = torch.zeros(T, 0, I, dtype=torch.float64)
    assert_close(ours(x), theirs(x))


def test_dropout_acts_between_layers_in_training():
    theirs, ours = pair(num_layers=2, dtype=torch.float32)
    x = torch.randn(T, 2000, I)
    for layer in (theirs, ours):
        layer.dropout = 0.4  # may be set later
    assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-6, atol=1e-6)
    means = [layer.train()(x)[0].mean((0, 1)) for layer in (ours, theirs)]
    assert_close(*means, rtol=0, atol=0.02)
    assert not torch.allclose(ours(x)[0], ours(x)[0])
    ours.dropout = theirs.dropout = 1.0
    assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_copies_and_files_are_independent():
    theirs, ours = pair()
    x = torch.randn(T, B, I, dtype=torch.float64)
    ours(x)
    twin, file = copy.deepcopy(ours), io.BytesIO()
    torch.save(ours.state_dict(), file)
    with torch.no_grad():
        ours.weight_hh_l0.zero_()
    assert_close(twin(x), theirs(x))
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))
    assert_close(ours(x), theirs(x))


def test_a_layer_without_data_is_filled_later():
    theirs, ours = pair(num_layers=2)[0], unfading.nn.LSTM(I, H, 2, device="meta", dtype=torch.float64)
    x = torch.randn(T, B, I, dtype=torch.float64)
    assert ours(x.to("meta"))[0].is_meta
    for assign in (False, True):
        layer = unfading.nn.LSTM(I, H, 2, device="meta", dtype=torch.float64)
        if not assign:
            layer.to_empty(device="cpu")
        layer.load_state_dict(theirs.state_dict(), assign=assign)
        assert_close(layer(x), theirs(x))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_norm_and_pruning_take_part(kind):
    theirs, ours = pair(kind)
    x = torch.randn(T, B, I, dtype=torch.float64)
    parametrizations.weight_norm(ours, "weight_hh_l0")
    with torch.no_grad():
        ours.parametrizations.weight_hh_l0.original0.mul_(2.0)
        theirs.weight_hh_l0.mul_(2.0)
    output, _ = ours(x)
    assert_close(output, theirs(x)[0])
    assert torch.autograd.grad(output.sum(), ours.parametrizations.weight_hh_l0.original1)[0].any()
    theirs, ours = pair(kind)
    mask = torch.rand_like(theirs.weight_hh_l0) < 0.5
    for layer in (theirs, ours):
        prune.custom_from_mask(layer, "weight_hh_l0", mask)
    assert_close(ours(x), theirs(x))


def test_transforms_compilation_and_export_run():
    theirs, ours = pair(num_layers=2, dtype=torch.float32)
    x = torch.randn(T, B, I)
    want = theirs(x)[0]
    parameters = dict(ours.named_parameters())
    stacked = {name: torch.stack([each, each]) for name, each in parameters.items()}
    call = lambda own: torch.func.functional_call(ours, own, (x,))[0]  # noqa: E731
    for output in (*torch.func.vmap(call)(stacked), call(parameters)):
        assert_close(output, want, rtol=1e-5, atol=1e-6)
    gradient = torch.func.grad(lambda own: call(own).sum())(parameters)["weight_hh_l0"]
    assert_close(gradient, torch.autograd.grad(want.sum(), theirs.weight_hh_l0)[0], rtol=1e-5, atol=1e-5)
    copy.deepcopy(ours)  # holds nothing of a transform
    compiled = torch.compile(nn.Sequential(nn.Identity(), ours), backend="eager")
    assert_close(compiled(x)[0], want, rtol=1e-5, atol=1e-6)
    exported = torch.export.export(ours.eval(), (x,)).module()
    assert_close(exported(x)[0], want, rtol=1e-5, atol=1e-6)


def test_second_derivatives():
    _, ours = pair("GRU")
    x = torch.randn(2, 1, I, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x)[0], x)


def test_resets_set_the_state_to_zero():
    theirs, ours = pair(num_layers=2, bidirectional=True)
    x = torch.randn(T, B, I, dtype=torch.float64)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[2] = True
    output, _ = ours(x, resets=resets)
    assert_close(output, torch.cat([theirs(x[:2])[0], theirs(x[2:])[0]]))


@pytest.mark.parametrize("layer", [unfading.nn.LSTM(I, H), unfading.STAR(I, H), nn.Sequential(unfading.STAR(I, H))], ids=str)
def test_torch_jit_script_is_refused_with_a_sentence(layer):
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile (LSTM|STAR).*Use torch\.export or"):
        torch.jit.script(layer)
