"""The tables that come with hocket, and the public files where they are at hand."""

from dataclasses import replace

import numpy as np
import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.measured_runs import read_runs
from hocket.cost.validation import (
    SITES,
    TABLES,
    load_tables,
    predict_memory,
    predict_steps,
    site_cluster,
)
from hocket.transformer.counts import parameter_counts, step_flops
from tests.cost.public_tables import DATA, converter, public_tables

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the repository")
SHIPPED = {
    "bloom": 30, "dgxc-h100": 32, "h100-weak-scaling": 9, "korthikanti-memory": 8,
    "korthikanti-table5": 8, "mt-nlg": 3, "sc21-table1": 10, "sc21-table2": 6, "sc21-zero3": 6,
}  # fmt: skip
PUBLIC = {
    "megatron-january-2021": 10, "h100-strong-scaling": 8, "nemo-h100-float8": 9,
    "dgx-a100-2020": 8, "dgx2-v100-2020": 4, "fsdp-h100": 35, "fsdp-h100-float8": 4,
    "fsdp-a100-80g": 30, "fsdp-a100-40g": 39, "torchtitan": 4, "torchtitan-float8": 12,
    "bridge-h100": 13, "bridge-h100-experts": 18, "bridge-blackwell": 49,
    "bridge-blackwell-experts": 79,
}  # fmt: skip


@pytest.fixture(scope="module")
def public():
    return public_tables()


def test_shipped_tables_have_their_rows():
    found = {name: len(rows) for name, rows in load_tables().items()}
    assert found == SHIPPED


@needs_data
def test_public_files_have_their_rows(public):
    assert {name: len(public[name]) for name in PUBLIC} == PUBLIC


@needs_data
def test_parameters_of_llm_foundry_are_those_that_it_states(public):
    stated = [
        int(record["n_params"])
        for record in converter().read_public(DATA / "mosaicml_llmfoundry_fsdp.csv")
    ]
    tables = public
    rows = [row for name in tables if name.startswith("fsdp-") for row in tables[name]]
    rows.sort(key=lambda row: int(row.row.partition(" ")[0]))
    assert [parameter_counts(row.model).total for row in rows] == stated


# What predictions from datasheets and measured kernels reach on each table; tolerances are wider.
ZERO_SHOT = {
    "fsdp-h100": 0.05, "fsdp-h100-float8": 0.07, "fsdp-a100-80g": 0.06, "fsdp-a100-40g": 0.07,
    "torchtitan": 0.08, "torchtitan-float8": 0.08, "bridge-h100": 0.06, "nemo-h100-float8": 0.06,
    "h100-weak-scaling": 0.07, "h100-strong-scaling": 0.05, "bridge-h100-experts": 0.20,
    "bridge-blackwell": 0.12, "bridge-blackwell-experts": 0.20,
}  # fmt: skip


@needs_data
@pytest.mark.parametrize("name", ZERO_SHOT)
def test_programs_of_today_are_predicted_from_what_chips_and_programs_are(name, public):
    rows = public[name]
    sites = {row.cluster: Coefficients() for row in rows}
    measured_s = np.array([row.step_s for row in rows])
    errors = predict_steps(rows, sites) / measured_s - 1
    assert np.abs(errors).mean() < ZERO_SHOT[name]


@needs_data
def test_runs_that_ran_are_said_to_fit(public):
    ran = [
        row
        for name in ("fsdp-h100", "fsdp-h100-float8", "fsdp-a100-80g", "fsdp-a100-40g",
                     "torchtitan", "torchtitan-float8", "bridge-h100", "bridge-h100-experts",
                     "bridge-blackwell", "bridge-blackwell-experts")
        for row in public[name]
    ]  # fmt: skip
    needed = predict_memory(ran, None)
    have = [site_cluster(row.cluster, 8).devices[0].memory_bytes for row in ran]
    assert sum(np.array(needed) > 1.05 * np.array(have)) <= 0.02 * len(ran)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_rows_are_consistent(name):
    check_rows(name, load_tables()[name])


@needs_data
@pytest.mark.parametrize("name", PUBLIC)
def test_public_rows_are_consistent(name, public):
    check_rows(name, public[name])


def check_rows(name, rows):
    for row in rows:
        config = row.config
        assert config.global_batch % (config.microbatch * config.data) == 0
        assert row.model.heads % config.tensor == 0
        # Stages that are stated may hold the embedding or the output layer alone.
        assert row.model.layers + (2 if config.layers else 0) >= config.num_stages
        assert config.layers is None or sum(config.layers) == row.model.layers
        assert config.layers is None or len(config.layers) == config.num_stages
        assert row.step_s or row.memory_bytes or row.is_oom
        assert row.cluster in SITES
        assert row.table == name


@pytest.mark.parametrize("name", SHIPPED)
def test_tables_name_their_source(name):
    assert (TABLES / f"{name}.csv").read_text().startswith("# source: ")


def test_sc21_rates_follow_from_the_times():
    rates = [137, 138, 142, 135, 138, 140, 148, 155, 163, 163]
    for row, rate in zip(load_tables()["sc21-table1"], rates, strict=True):
        flops = step_flops(row.model, row.config.global_batch, "hardware-full-recompute")
        found = flops / row.step_s / row.config.num_devices / 1e12
        assert found == pytest.approx(rate, rel=0.011)


def test_names_of_sc21_rows_are_their_parameters():
    for row in load_tables()["sc21-table1"]:
        billions = parameter_counts(row.model).total / 1e9
        named = 1000 if row.row == "1T" else float(row.row.removesuffix("B"))
        assert billions == pytest.approx(named, rel=0.03)


def test_a_table_survives_writing(tmp_path):
    for name in ("bloom", "dgxc-h100", "korthikanti-table5"):
        rows = load_tables()[name]
        converter().write_table(tmp_path / f"{name}.csv", rows)
        assert [_facts(row) for row in read_runs(tmp_path / f"{name}.csv")] == [
            _facts(row) for row in rows
        ]


@pytest.mark.parametrize("name", SITES)
def test_sites_have_the_network_that_is_stated(name):
    cluster = site_cluster(name, 144)  # two hosts at least of every kind
    num_hosts = len(cluster.hosts)
    network = sum(link.bandwidth_bps for link in cluster.links if "network" in link.ends)
    per_host = network / num_hosts
    assert cluster.num_devices == 144
    assert per_host == pytest.approx(SITES[name].network_bps)


def test_unknown_site_is_refused():
    with pytest.raises(UsageError, match="unknown site"):
        site_cluster("selen", 8)


def test_stages_of_bloom_follow_deepspeed():
    bloom_stages = converter().bloom_stages
    assert bloom_stages(72, 12) is None
    assert bloom_stages(70, 12) == (5, *[6] * 10, 5)
    assert bloom_stages(78, 12) == (*[7] * 11, 1)
    for layers in range(13, 90):
        stages = bloom_stages(layers, 12)
        assert stages is None or (len(stages) == 12 and sum(stages) == layers and min(stages) > 0)


@needs_data
def test_shipped_rows_are_those_of_the_public_files(public):
    shipped = load_tables()
    for name, rows in shipped.items():
        if name == "korthikanti-memory":
            continue
        known = {_facts(row) for row in public[name]}
        assert {_facts(row) for row in rows} <= known, name


@needs_data
def test_public_files_hold_more(public):
    assert len(public["vtrain-single"]) > 500
    assert len(public["vtrain-multi"]) > 40
    assert len(public["bloom"]) > 60
    assert sum(row.is_oom for row in public["bloom"]) >= 2


def test_missing_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputFileError, match="holds no table"):
        load_tables(tmp_path / "none")


def test_a_folder_without_tables_is_an_input_error(tmp_path):
    with pytest.raises(InputFileError, match="holds no table"):
        load_tables(tmp_path)


def _facts(row):
    step_s = None if row.step_s is None else f"{row.step_s:.5g}"
    memory = None if row.memory_bytes is None else round(row.memory_bytes / 2**30, 3)
    return (
        replace(row.model, name="", source=""),
        row.config,
        row.cluster,
        step_s,
        memory,
        row.is_oom,
    )
