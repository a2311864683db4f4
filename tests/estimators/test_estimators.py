"""The estimators keep scikit-learn's contract, and work in its pipelines and searches."""

import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from unfading.estimators import RecurrentClassifier, RecurrentRegressor

DRAW = np.random.default_rng(0)
SIGNS = DRAW.choice([-1, 1], 60)
X = SIGNS[:, None, None] + 0.3 * DRAW.standard_normal((60, 5, 2))
FAST = {"cell": "GRU", "hidden": 4, "epochs": 12, "batch": 8, "rate": 0.02}

# A check of scikit-learn's that cannot hold, with the reason.
NOT_HELD = {
    "check_methods_subset_invariance": "float32: a batch of another size may change the last digit, and the check wants 1e-7"
}


@pytest.mark.long
@parametrize_with_checks(
    [
        RecurrentClassifier("GRU", hidden=8, epochs=20, patience=None, rate=0.02),
        RecurrentRegressor("GRU", hidden=8, epochs=30, patience=None, rate=0.02, validation=0.0, readout="last"),
    ],
    expected_failed_checks=lambda estimator: NOT_HELD,
)
@pytest.mark.filterwarnings("ignore")
def test_the_contract_of_scikit_learn_is_kept(estimator, check):
    check(estimator)


QUICK = [
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_estimator_cloneable",
    "check_n_features_in",
    "check_estimators_nan_inf",
    "check_dict_unchanged",
    "check_fit1d",
    "check_fit2d_1sample",
]


@pytest.mark.parametrize("kind", [RecurrentClassifier, RecurrentRegressor])
@pytest.mark.filterwarnings("ignore")
def test_the_quick_part_of_the_contract_is_kept(kind):
    checks = [pair for pair in estimator_checks_generator(kind("Elman", hidden=2, epochs=1)) if pair[1].func.__name__ in QUICK]
    assert {check.func.__name__ for _, check in checks} == set(QUICK)
    for estimator, check in checks:
        check(estimator)


def test_one_class_and_one_sequence_are_refused():
    with pytest.raises(ValueError, match="the targets have one class, 'up'; a classification needs at least two"):
        RecurrentClassifier(**FAST).fit(X, ["up"] * 60)
    with pytest.raises(ValueError, match="one sample, a single sequence; training needs at least two"):
        RecurrentRegressor(**FAST).fit(X[:1], [0.5])


def test_a_classifier_learns_and_is_pickled():
    model = RecurrentClassifier(**FAST).fit(X, np.where(SIGNS > 0, "up", "down"))
    assert model.classes_.tolist() == ["down", "up"]
    assert model.score(X, np.where(SIGNS > 0, "up", "down")) > 0.95
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(X), model.predict_proba(X))
    again = clone(model).fit(X, np.where(SIGNS > 0, "up", "down"))
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_every_form_of_sequences_trains_the_same_model():
    fitted = [
        RecurrentClassifier(**FAST).fit(form, SIGNS).predict_proba(X) for form in (X, torch.from_numpy(X), list(X), X.tolist())
    ]
    for other in fitted[1:]:
        assert np.array_equal(other, fitted[0])


def test_sequences_of_any_lengths_are_a_list():
    rows = [x[: 2 + i % 4] for i, x in enumerate(X)]
    model = RecurrentClassifier(**FAST).fit(rows, SIGNS)
    assert model.score(rows, SIGNS) > 0.9
    assert model.n_features_in_ == 2
    with pytest.raises(ValueError, match=r"X\[3\] has NaN at step 1, channel 0"):
        model.predict([*rows[:3], np.array([[0.0, 0.0], [np.nan, 0.0]])])


def test_missing_values_are_refused_by_row_and_column():
    table = X[:, :, 0].copy()
    table[7, 2] = np.nan
    for estimator in (RecurrentClassifier(**FAST), RecurrentRegressor(**FAST)):
        with pytest.raises(ValueError, match="X has NaN at row 7, column 2"):
            estimator.fit(table, SIGNS)


def test_weights_of_classes_move_the_decision():
    rare = np.arange(60) % 6 == 0
    values = 0.1 * rare[:, None] + 0.5 * DRAW.standard_normal((60, 5))
    plain, balanced = (RecurrentClassifier(**FAST, class_weight=weight).fit(values, rare) for weight in (None, "balanced"))
    assert balanced.predict(values).sum() > plain.predict(values).sum()


def test_training_stops_when_patience_is_over():
    noise = DRAW.integers(2, size=60)
    model = RecurrentClassifier(**{**FAST, "epochs": 200}, patience=2).fit(X, noise)
    assert model.record_["steps"] < 200 * (48 // 8)


def test_pipelines_and_searches():
    scaled = make_pipeline(StandardScaler(), RecurrentClassifier(**FAST))
    assert scaled.fit(X[:, :, 0], SIGNS).score(X[:, :, 0], SIGNS) > 0.95
    cut = make_pipeline(FunctionTransformer(lambda x: x[:, 2:]), RecurrentRegressor(**FAST))
    search = GridSearchCV(cut, {"recurrentregressor__hidden": [1, 4]}, cv=2).fit(X, 10.0 * SIGNS)
    assert search.best_params_["recurrentregressor__hidden"] in (1, 4)
    assert cross_val_score(RecurrentClassifier(**FAST), X, SIGNS, cv=2).mean() > 0.9


def test_a_regressor_of_several_outputs():
    y = np.stack([SIGNS, -10.0 * SIGNS], axis=1)
    model = RecurrentRegressor(**{**FAST, "epochs": 40}).fit(X, y)
    assert model.predict(X).shape == (60, 2)
    assert model.score(X, y) > 0.7


def test_settings_of_the_run_can_be_given():
    model = RecurrentClassifier(**FAST, settings={"schedule": "cosine"}, cell_options={"zoneout": 0.1}).fit(X, SIGNS)
    assert model.model_.run.schedule == "cosine"
    assert model.model_.run.cell_options == {"zoneout": 0.1}
