"""Where the own etcd of a run over several machines is found."""

from realsys.cluster.names.connect import is_known, store_address
from realsys.cluster.process import STORE_ADDRESS
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.workers.name_store import ensure_certificate

OWN = {"backend": "etcd", "start": True, "address": "127.0.0.1:2379"}


def config(nodes, address="127.0.0.1:2379"):
    return Config.model_validate({"cluster": {"nodes": nodes, "name_store": {**OWN, "address": address}}})


def test_address_is_in_the_folder_once_its_machine_joined(tmp_path):
    """`realsys status` and the display have no environment of a worker."""
    paths = TrialPaths(tmp_path)
    assert not is_known(config(2), paths)
    paths.store_address.write_text("10.1.0.7:2379")
    assert not is_known(config(2), paths), "etcd has made no certificate yet"
    ensure_certificate(paths.etcd_certificate, "10.1.0.7")
    assert is_known(config(2), paths) and store_address(config(2), paths) == "10.1.0.7:2379"


def test_address_of_one_machine_or_of_a_site_is_configured(tmp_path):
    paths = TrialPaths(tmp_path)
    ensure_certificate(paths.etcd_certificate, "127.0.0.1")
    for each, expected in ((config(0), "127.0.0.1:2379"), (config(2, "10.1.0.9:2379"), "10.1.0.9:2379")):
        assert is_known(each, paths) and store_address(each, paths) == expected


def test_worker_has_the_address_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(STORE_ADDRESS, "10.1.0.8:2379")
    assert store_address(config(2), TrialPaths(tmp_path)) == "10.1.0.8:2379"
