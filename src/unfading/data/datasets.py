"""The table of datasets: content, source, licence and checksums of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Download:
    """One downloadable file.

    Args:
        urls: https addresses of the same file, tried in this order.
        checksum: "sha256:..." or "md5:...", as the publisher or a mirror states it.
        name: file name.
        inside: None for a plain file; for an archive, the folder inside it to extract.
    """

    urls: tuple[str, ...]
    checksum: str
    name: str
    inside: str | None = None


@dataclass(frozen=True)
class Dataset:
    """One dataset.

    Args:
        what: description in one line.
        home: the publisher's page.
        licence: as the publisher states it.
        megabytes: size of the download, in units of 10^6 bytes.
        folder: its folder below the data folder, in the publisher's own layout.
        files: required files below `folder`, each with its sha256, or None if no reliable checksum is known.
        downloads: the files that `fetch` downloads; empty if the dataset must be downloaded by hand.
        by_hand: instructions for that case.
        package: an installed package that ships the same files, and the folder inside it; used if the data folder lacks them.
        pickled: a published form, below the data folder, that is a pickle and therefore refused.
    """

    what: str
    home: str
    licence: str
    megabytes: float
    folder: str
    files: Mapping[str, str | None] = field(default_factory=dict)
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""
    package: tuple[str, str] | None = None
    pickled: str | None = None


MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}

DATASETS: dict[str, Dataset] = {
    "mnist": Dataset(
        what="60,000 + 10,000 handwritten digits, 28 x 28",
        home="http://yann.lecun.com/exdb/mnist/",
        licence="CC BY-SA 3.0, as usually stated",
        megabytes=11.6,
        folder="MNIST/raw",
        files=MNIST_FILES,
        downloads=tuple(
            Download(
                urls=(
                    f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
                    f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
                ),
                checksum=f"sha256:{checksum}",
                name=name,
            )
            for name, checksum in MNIST_FILES.items()
        ),
    ),
    "cifar10": Dataset(
        what="50,000 + 10,000 colour images of ten things, 32 x 32",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated; cite Krizhevsky 2009",
        megabytes=170.1,
        folder="cifar-10-batches-bin",
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        downloads=(
            Download(
                urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                name="cifar-10-binary.tar.gz",
                inside="cifar-10-batches-bin",
            ),
        ),
        pickled="cifar-10-batches-py",
    ),
    "digits": Dataset(
        what="1,797 handwritten digits, 8 x 8, as in scikit-learn",
        home="https://archive.ics.uci.edu/dataset/80",
        licence="CC BY 4.0",
        megabytes=0.1,
        folder="digits",
        files={"digits.csv.gz": "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"},
        downloads=(
            Download(
                urls=("https://raw.githubusercontent.com/scikit-learn/scikit-learn/1.7.X/sklearn/datasets/data/digits.csv.gz",),
                checksum="sha256:09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
                name="digits.csv.gz",
            ),
        ),
        package=("sklearn", "datasets/data"),
    ),
    "ptb": Dataset(
        what="Penn Treebank, Mikolov's preparation: words and characters",
        home="http://www.fit.vutbr.cz/~imikolov/rnnlm/",
        licence="property of the LDC; for research",
        megabytes=34.9,
        folder="ptb",
        files={
            "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
            "ptb.char.train.txt": "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
            "ptb.char.valid.txt": "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
            "ptb.char.test.txt": "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
        },
        downloads=(
            Download(
                urls=(
                    "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
                    "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
                ),
                checksum="md5:30177ea32e27c525793142b6bf2c8e2d",
                name="simple-examples.tgz",
                inside="simple-examples/data",
            ),
        ),
    ),
    "har": Dataset(
        what="smartphone inertial signals, 7,352 + 2,947 windows of 9 x 128, six activities",
        home="https://archive.ics.uci.edu/dataset/240",
        licence="CC BY 4.0; cite Anguita 2013",
        megabytes=61.0,
        folder="UCI HAR Dataset",
        files={
            f"{split}/{name}_{split}.txt": None
            for split in ("train", "test")
            for name in ["y", "subject"]
            + [f"Inertial Signals/{kind}_{axis}" for kind in ("total_acc", "body_acc", "body_gyro") for axis in "xyz"]
        },
        by_hand="download the zip from its home and unpack `UCI HAR Dataset` into the data folder",
    ),
    "speech_commands": Dataset(
        what="Google Speech Commands 0.01: 64,727 clips of 30 words, one second at 16 kHz",
        home="https://research.google/blog/launching-the-speech-commands-dataset/",
        licence="CC BY 4.0",
        megabytes=1489.1,
        folder="speech_commands_v0.01",
        files={"validation_list.txt": None, "testing_list.txt": None},
        downloads=(
            Download(
                urls=(
                    "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.01.tar.gz",
                    "https://download.tensorflow.org/data/speech_commands_v0.01.tar.gz",
                ),
                checksum="sha256:743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
                name="speech_commands_v0.01.tar.gz",
                inside=".",
            ),
        ),
    ),
    "dsa": Dataset(
        what="daily and sports activities: 9,120 segments of 45 x 125, nineteen activities, eight people",
        home="https://archive.ics.uci.edu/dataset/256",
        licence="CC BY 4.0; cite Barshan 2014",
        megabytes=163.2,
        folder="dsa/data",
        by_hand="download the zip from its home and unpack its `data` folder into `dsa` in the data folder",
    ),
    "yelp": Dataset(
        what="Yelp reviews with one to five stars, JSON lines",
        home="https://www.yelp.com/dataset",
        licence="Yelp dataset terms of use",
        megabytes=4350.0,
        folder="yelp",
        files={"yelp_academic_dataset_review.json": None},
        by_hand="accept the terms at its home, and unpack the reviews into `yelp` in the data folder",
    ),
    "tum": Dataset(
        what="Sentinel-2 observations of fields: 26 dates x 54 features, crop classes",
        home="https://mediatum.ub.tum.de/1370728",
        licence="CC BY 4.0",
        megabytes=5000.0,
        folder="tum",
        files={"train.npz": None, "test.npz": None},
        by_hand="the published files are pickles: docs/tasks/real-data.md turns them into train.npz and test.npz",
        pickled="tum/data",
    ),
    "jester": Dataset(
        what="20BN-Jester V1: 148,092 video clips of 27 hand gestures, as JPEG frames",
        home="https://www.qualcomm.com/developer/software/jester-dataset",
        licence="for research; cite Materzynska 2019",
        megabytes=22800.0,
        folder="jester",
        files={f"jester-v1-{name}.csv": None for name in ("labels", "train", "validation")},
        by_hand="register at its home, then unpack clips (20bn-jester-v1) and label files into `jester` in the data folder",
    ),
    "ucr": Dataset(
        what="UCR/UEA time series archive: <name>/<name>_TRAIN and _TEST as .ts or .tsv",
        home="https://www.timeseriesclassification.com",
        licence="for research; cite Dau 2019",
        megabytes=0.0,
        folder="UCR",
        by_hand="download the sets that you want from its home and unpack each into `UCR/<name>` in the data folder",
    ),
}
