"""Lines of the results ledger for tests: a row of a paper, and a run of it."""


def claim(**own):
    """The line of a row."""
    base = {"kind": "row", "item": "p/t", "title": "A table.", "row": "r", "published": 95.0, "tolerance": 0.4, "unit": "%"}
    return {
        **base,
        "seeds": 1,
        "share": None,
        "fails": False,
        "settings": [],
        "note": "",
        "printed": "",
        "dataset": None,
        "changed_after_test": "",
        "here": True,
        **own,
    }


def line(score, seed=0, **own):
    """The line of a run with this accuracy; it has none if the score is None."""
    fields = {
        "task": "adding",
        "task_options": {"T": 20},
        "cell": "STAR",
        "cell_options": {},
        "hidden": 8,
        "layers": 1,
        "rates": {},
    }
    fields |= {
        "optimiser": "adam",
        "optimiser_options": {"l2": 0.01, "weight_decay": 0.0},
        "rate": 1e-3,
        "schedule": "constant",
        "schedule_options": {},
        "clip_norm": 1.0,
        "batch": 4,
        "steps": 100,
        "epochs": None,
    }
    machine = {"cpu": "a CPU", "cores": 2, "gpu": "NVIDIA H200"}
    base = {
        "kind": "run", "item": "p/t", "row": "r", "budget": "paper", "place": "adding 20", "key": f"{seed}",
        "measure": "accuracy", "rising": True, "guess": 0.1, "status": "finished", "seconds": 10.0,
        "test": None if score is None else {"accuracy": score}, "parameters": {"all": 1000, "recurrent": 900},
        "run": {**fields, "split": "full", "seed": seed}, "curve": [],
        "about": {"machine": machine, "commit": "0123456789"},
    }  # fmt: skip
    return {**base, **own}
