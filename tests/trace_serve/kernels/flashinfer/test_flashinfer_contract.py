"""What is called in FlashInfer is what is installed, and a changed library is refused by name."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from flashinfer_library import load

import trace_serve.kernels.flashinfer as backend
from trace_serve.errors import EngineError
from trace_serve.kernels.flashinfer import contract, experts
from trace_serve.kernels.flashinfer.contract import CALLS, Call

SOURCES = sorted(Path(inspect.getfile(backend)).parent.glob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def flashinfer():
    return load("flashinfer")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_every_call_fits_the_installed_signature(call):
    assert call.problem() == ""


def test_the_whole_contract_holds_for_the_pinned_version():
    assert contract.installed_version() == contract.VERSION
    contract.check_contract()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_parameter_that_the_library_lacks_is_named(call):
    broken = replace(call, parameters=(*call.parameters, "renamed"))
    with pytest.raises(EngineError, match=rf"{call.name}: has no parameter 'renamed' .*install flashinfer-python==0"):
        contract.check_contract((broken,))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_parameter_that_the_library_requires_and_we_do_not_pass_is_named(call):
    broken = replace(call, parameters=call.parameters[1:])
    with pytest.raises(EngineError, match=rf"{call.name}: requires parameter '{call.parameters[0]}'"):
        contract.check_contract((broken,))


def test_a_function_that_moved_is_named():
    with pytest.raises(EngineError, match=r"flashinfer\.decode\.gone: cannot be imported"):
        contract.check_contract((Call("flashinfer.decode", "gone", ()),))
    with pytest.raises(EngineError, match=r"flashinfer\.nowhere\.gone: cannot be imported"):
        contract.check_contract((Call("flashinfer.nowhere", "gone", ()),))


def test_a_changed_library_is_refused_before_the_call_is_made(monkeypatch):
    reached = []

    def changed(sf, m, k, groups, sf_vec_size=16):
        reached.append(sf)

    monkeypatch.setattr(load("flashinfer.cute_dsl.utils"), "convert_sf_to_mma_layout", changed)
    contract._verified.cache_clear()
    with pytest.raises(EngineError, match="convert_sf_to_mma_layout: has no parameter 'num_groups'"):
        contract.MMA_SCALES(sf=0, m=1, k=1, num_groups=1, sf_vec_size=16)
    assert not reached


def test_a_call_passes_exactly_what_the_contract_lists():
    with pytest.raises(TypeError, match="sf_vec_size passed but not in the contract, or the reverse"):
        contract.MMA_SCALES(sf=0, m=1, k=1, num_groups=1)
    with pytest.raises(TypeError, match="extra passed but not"):
        contract.MMA_SCALES(sf=0, m=1, k=1, num_groups=1, sf_vec_size=16, extra=1)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_flashinfer_is_reached_through_the_contract_alone(path):
    imported = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert not [name for name in imported if name.split(".")[0] == "flashinfer"]


def test_the_activation_type_is_the_librarys():
    assert load("flashinfer.tllm_enums").ActivationType.Swiglu.value == experts.SWIGLU


def test_the_tiles_are_among_those_that_the_library_offers_for_sm_100():
    tuner = load("flashinfer.fused_moe.cute_dsl.tuner")
    assert experts._TACTIC in tuner.ALL_BLACKWELL_MOE_TACTICS
    tile, (first, first_cluster, _), (second, second_cluster, _) = experts._TACTIC
    assert {first, second} == {experts._PRODUCT["mma_tiler_mn"]} == {(tile, tile)}
    assert {first_cluster, second_cluster} == {experts._PRODUCT["cluster_shape_mn"]}
