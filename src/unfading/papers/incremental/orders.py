"""Kag, Zhang & Saligrama 2020: claims about several rows of a table or figure. A function is named as its item.

Training times are printed in hours; ours are seconds of one seed at the epochs of the row. Claims that begin with "Ours" are
not in the paper.
"""

from unfading.papers.row import Order, Ranking

BASELINES = ("FastRNN", "LSTM", "Antisymmetric")


def table1() -> list[Order | Ranking]:
    """Pixel and permuted MNIST."""
    pixel, permuted = "pixel iRNN K=1, rank 12", "permuted iRNN K=1, rank 27"
    return [
        Order("iRNN trains 9 times faster than LSTM (section 4.3.2)", (pixel,), ("pixel LSTM",), by="seconds", factor=9),
        Order(
            "iRNN trains 2 times faster than Antisymmetric (section 4.3.2)",
            (pixel,),
            ("pixel Antisymmetric",),
            by="seconds",
            factor=2,
        ),
        Order(
            "FastRNN trains at least 2 times faster than LSTM (section 4.3.2)",
            ("pixel FastRNN",),
            ("pixel LSTM",),
            by="seconds",
            factor=2,
        ),
        Order(
            "on permuted MNIST too iRNN trains at least 2 times faster than the strongest baseline (section 4.3.2)",
            (permuted,),
            ("permuted Antisymmetric",),
            by="seconds",
            factor=2,
        ),
        Order(
            "iRNN scores higher than the baselines on permuted MNIST (section 4.3.2)",
            (permuted,),
            tuple(f"permuted {name}" for name in BASELINES),
        ),
        *_equal_terms("pixel", 12, 8),
        *_equal_terms("permuted", 27, 18),
    ]


def _equal_terms(task: str, rank: int, stable_rank: int) -> list[Order | Ranking]:
    paper, ours = f"{task} iRNN K=1, rank {rank}, equal terms", f"{task} ours K=1, rank {stable_rank}, equal terms"
    return [Order("Ours: the stable form scores higher than the paper's at equal terms", (ours,), (paper,))]


def table2() -> list[Order | Ranking]:
    """Noisy MNIST and noisy CIFAR."""
    claims: list[Order | Ranking] = []
    for task, hours in (
        ("noisy MNIST", "2.39 h against 5.21, 8.93 and 19.43"),
        ("noisy CIFAR", "2.47 h against 5.81, 11.61 and 23.47"),
    ):
        first = (f"{task} iRNN K=1, rank 5",)
        then = tuple(f"{task} {name}" for name in ("FastRNN", "LSTM, forget bias 1", "Antisymmetric"))
        claims += [
            Order(f"{task}: iRNN scores higher than the baselines (Table 2)", first, then),
            Order(
                f"{task}: iRNN trains at least 2 times faster than the baselines ({hours}, Table 2)",
                first,
                then,
                by="seconds",
                factor=2,
            ),
            *_equal_terms(task, 5, 8),
        ]
    return claims


def table3() -> list[Order | Ranking]:
    """HAR-2 and Google-30."""
    claims: list[Order | Ranking] = []
    for task, hours in (("HAR-2", " (0.018 h against 0.061)"), ("Google-30", "")):
        one, five = f"{task} iRNN K=1", f"{task} iRNN K=5"
        claims += [
            Order(
                f'{task}: iRNN "outperforms the baselines on all metrics even with K = 1" (Table 3)',
                (one,),
                tuple(f"{task} {name}" for name in ("FastRNN", "RNN", "LSTM", "Antisymmetric")),
            ),
            Order(f"{task}: K = 5 scores higher than K = 1 (Table 3)", (five,), (one,)),
        ]
        if hours:
            claims.append(Order(f"{task}: K = 5 trains faster than K = 1{hours}, Table 3", (five,), (one,), by="seconds"))
    return claims


def table9() -> list[Order | Ranking]:
    """All baselines."""
    names = ("FastRNN", "FastGRNN-LSQ", "FastGRNN", "RNN", "SpectralRNN", "EURNN", "LSTM", "GRU", "Antisymmetric", "UGRNN")
    return [
        Order(
            f"{task}: K = 5 scores higher than every baseline (Table 9)",
            (f"{task} iRNN K=5",),
            tuple(f"{task} {name}" for name in names),
        )
        for task in ("HAR-2", "Google-12", "Google-30")
    ]


def table10() -> list[Order | Ranking]:
    """Penn Treebank by words."""
    first, then = ("iRNN K=1, rank 15",), ("FastRNN", "FastGRNN-LSQ", "FastGRNN", "RNN", "LSTM", "UGRNN")
    return [
        Order("iRNN has the lowest perplexity (Table 10)", first, (*then, "SpectralRNN")),
        Order("iRNN trains in the least time (7.11 min against 9.11 to 13.75, Table 10)", first, then, by="seconds"),
    ]


def table11() -> list[Order | Ranking]:
    """ReLU and sigmoid on HAR-2."""
    claims: list[Order | Ranking] = []
    for kind, suffix in (("ReLU", ""), ("sigmoid", ", sigmoid")):
        one, three, five = (f"HAR-2 iRNN K={K}{suffix}" for K in (1, 3, 5))
        claims.append(Order(f"with {kind} K = 5 scores higher than K = 3 and K = 1 (Table 11)", (five,), (three, one)))
        claims.append(Order(f"with {kind} K = 3 scores higher than K = 1 (Table 11)", (three,), (one,)))
    return [
        *claims,
        *(
            Order(
                f"ReLU scores higher than a sigmoid at K = {K} (Table 11)",
                (f"HAR-2 iRNN K={K}",),
                (f"HAR-2 iRNN K={K}, sigmoid",),
            )
            for K in (1, 3, 5)
        ),
    ]


def fig3() -> list[Order | Ranking]:
    """Adding, T = 200: K = 1, 5, 10 and the ablation family."""
    one, five, ten = (f"adding 200 iRNN K={K}" for K in (1, 5, 10))
    others = tuple(
        f"adding 200 {name}"
        for name in ("FastRNN eta=0.01", "FastRNN eta=0.001", "Antisymmetric epsilon=0.1", "Antisymmetric epsilon=0.001", "RNN")
    )
    return [
        Order("K = 10 converges within 300 steps (section 4.2 b)", (ten,), (), by="steps", bound=300),
        Order("K = 10 converges in fewer steps than K = 5 and K = 1 (Fig. 3a)", (ten,), (five, one), by="steps"),
        Order("K = 5 converges in fewer steps than K = 1 (section 4.2 c)", (five,), (one,), by="steps"),
        Order(
            "other methods take about twice the steps of K = 10 (section 4.2 b; judged at 1.5 times)",
            (ten,),
            others,
            by="steps",
            factor=1.5,
        ),
        Order("K = 1 converges in fewer steps than other methods (section 4.2 c)", (one,), others, by="steps"),
        Order("FastRNN has a lower error with eta = 0.01 than with 0.001 (section 4.2 a)", (others[0],), (others[1],)),
        Order("Antisymmetric has a lower error with epsilon = 0.1 than with 0.001 (section 4.2 a)", (others[2],), (others[3],)),
    ]


def fig4() -> list[Order | Ranking]:
    """Copying and adding."""
    claims: list[Order | Ranking] = []
    for task in ("copying 200", "copying 500", "adding 200", "adding 750"):
        others = tuple(f"{task} {name}" for name in ("RNN", "LSTM", "Antisymmetric", "FastRNN"))
        text = (
            "iRNN is the only one that solves it"
            if task.startswith("copying")
            else "iRNN converges in fewer steps than the baselines"
        )
        claims.append(Order(f"{task}: {text} (section 4.3.1)", (f"{task} iRNN K=5",), others, by="steps"))
    twice = "adding 200: FastRNN takes twice the steps of iRNN (section 4.3.1)"
    return [*claims, Order(twice, ("adding 200 iRNN K=5",), ("adding 200 FastRNN",), by="steps", factor=2)]


def fig5() -> list[Order | Ranking]:
    """Adding, T = 100 and 400."""
    return [
        Order(
            f"adding {T}: iRNN converges in fewer steps than the baselines (Fig. 5)",
            (f"adding {T} iRNN K=5",),
            tuple(f"adding {T} {name}" for name in ("RNN", "LSTM", "Antisymmetric", "FastRNN")),
            by="steps",
        )
        for T in (100, 400)
    ]
