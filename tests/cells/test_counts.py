"""Published parameter counts, of the whole model: encoder, recurrent stack, head."""

import pytest
from torch import nn

import unfading
from unfading import LastStep, Model, catalogue


def count(rnn, answers):
    return sum(p.numel() for p in Model(nn.Identity(), rnn, LastStep(rnn.output_size, answers)).parameters())


@pytest.mark.parametrize(
    ("layer", "published"),
    [
        (unfading.STAR, [18_186, 67_594, 166_410, 364_042, 759_306]),
        (unfading.LSTM, [67_850, 199_434, 462_602, 988_938, 2_041_610]),
        (unfading.ForgetLSTM, [34_570, 100_362, 231_946, 495_114, 1_021_450]),
        (unfading.Elman, [17_930, 50_826, 116_618, 248_202, 511_370]),
    ],
)
@pytest.mark.sample(2)
def test_star_table_2(layer, published):
    assert [count(layer(1, 128, depth), 10) for depth in (1, 2, 4, 8, 16)] == published


# Copying memory reads 10 symbols and answers 9; psMNIST reads one pixel and answers 10.
@pytest.mark.parametrize(
    ("copying", "psmnist", "counts"),
    [
        (unfading.NRU(10, 80, memory_size=64), unfading.NRU(1, 212, memory_size=256), (24_289, 165_690)),
        (unfading.NRU.released(10, 80, memory_size=64), unfading.NRU.released(1, 212, memory_size=256), (23_569, 165_554)),
        (unfading.PeepholeLSTM(10, 70), unfading.PeepholeLSTM(1, 200), (23_529, 164_210)),
        (unfading.GRU(10, 82), unfading.GRU(1, 232), (23_625, 165_194)),
        (unfading.JANET(10, 101), unfading.JANET(1, 283), (23_542, 164_150)),
    ],
    ids=["NRU", "NRU.released", "PeepholeLSTM", "GRU", "JANET"],
)
def test_nru_tables(copying, psmnist, counts):
    assert (count(copying, 9), count(psmnist, 10)) == counts


@pytest.mark.parametrize(("K", "published"), [(1, 25_004), (2, 25_304), (3, 25_604)])
def test_incremental_yelp_without_head_and_embedding(K, published):
    cell = unfading.IncrementalRNNCell(128, 128, rank=32, steps=300, inner_steps=K)
    assert sum(p.numel() for p in cell.parameters()) == published


def test_incremental_ptb_and_pixel_mnist():
    ptb = unfading.SiRNNCell(256, 256, rank=15, steps=300)
    pixel = unfading.SiRNNCell(1, 128, rank=12, steps=784)
    assert [sum(p.numel() for p in cell.parameters()) for cell in (ptb, pixel)] == [73_772, 4_112]


def test_recurrent_highway_in_star_table_2():
    """One layer of recurrence depth L with three uncoupled transforms; the paper prints 795k at 16."""
    counts = [count(unfading.RecurrentHighway(1, 128, depth=depth, coupled=False), 10) for depth in (1, 2, 4, 8, 16)]
    assert counts == [51_210, 100_746, 199_818, 397_962, 794_250]


def test_nru_baselines_with_layer_norm_and_statistics():
    assert count(unfading.OrthogonalRNN(10, 143, normalise=True), 9) == 23_604
    assert count(unfading.IdentityRNN(1, 400, normalise=True), 10) == 165_610
    scales = [0.0, 0.5, 0.9, 0.99, 0.999]
    assert count(unfading.StatisticalRNN(10, 60, statistics=55, summary_size=16, scales=scales), 9) == 23_010
    assert count(unfading.StatisticalRNN(1, 150, statistics=155, summary_size=50, scales=scales), 10) == 164_770


def test_unitary_family():
    assert count(unfading.EURNN(1, 1024), 10) == 17_418
    assert count(unfading.GORU(1, 256), 10) == 136_202
    assert count(unfading.UnitaryRNN(1, 512, learn_initial_state=True), 10) == 16_394
    cell = unfading.FullUnitaryRNNCell(1, 16)
    assert cell.skew.numel() + cell.symmetric.numel() == 16**2


def test_antisymmetric_counts_its_free_entries():
    assert count(unfading.AntisymmetricRNN(1, 128), 10) == 9_674


def test_soft_orthogonal_and_stable():
    assert count(unfading.SoftOrthogonalRNN(1, 128), 10) == 17_930
    cell = unfading.StableIncrementalRNNCell(1, 128, rank=8, steps=784)
    assert sum(p.numel() for p in cell.parameters()) == 4_112


def test_fast_har2():
    """EdgeML: FastGRNN with ranks 5 and 40 has 7,169 parameters (28.0 KB); dense, without ranks, 7,444."""
    assert count(unfading.FastGRNN(9, 80, input_rank=5, rank=40), 2) == 7_169
    assert count(unfading.FastGRNN(9, 80), 2) == 7_444
    assert count(unfading.Elman(9, 80), 2) == 7_362


def test_convolutional_cells_at_the_sizes_of_the_gesture_network():
    """3 x 3 kernels, 64 filters, on 3 and on 64 channels: counted by hand, since STAR's paper prints none."""
    kernel, wide = 3 * 64 * 9, 64 * 64 * 9
    first = {"ConvSTAR": 2 * kernel + wide, "ConvForgetLSTM": 2 * (kernel + wide), "ConvLSTM": 4 * (kernel + wide)}
    later = {"ConvSTAR": 3 * wide, "ConvForgetLSTM": 4 * wide, "ConvLSTM": 8 * wide}
    biases = {"ConvSTAR": 2 * 64, "ConvForgetLSTM": 2 * 64, "ConvLSTM": 4 * 64}
    for name in first:
        layer = getattr(unfading, name)(3, 64, 3, num_layers=12)
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        assert parameters == first[name] + 11 * later[name] + 12 * biases[name]
        for cell, convolutions in ((layer.cells[0], first), (layer.cells[1], later)):
            entry = catalogue.entry(type(cell), input_size=cell.input_size, hidden_size=64, length=32, frame=(112, 112))
            assert entry.multiply_adds_per_step == 112 * 112 * convolutions[name]
            assert entry.multiply_adds_per_sequence == 32 * entry.multiply_adds_per_step
