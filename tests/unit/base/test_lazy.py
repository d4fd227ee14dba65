import sys
from fractions import Fraction

import pytest

from nestrec.base.errors import UserError
from nestrec.base.lazy import import_attribute, import_extra


def test_import_attribute_imports_names_only():
    assert import_attribute("fractions:Fraction") is Fraction
    assert import_attribute(Fraction) is Fraction
    assert import_attribute(None) is None


def test_import_extra_returns_the_module():
    assert import_extra("fractions", "redis", "is needed").Fraction is Fraction


def test_import_extra_names_the_extra_to_install():
    with pytest.raises(UserError) as error:
        import_extra("absent_package.part", "redis", "is needed for this store")
    assert error.value.option == "package"
    assert error.value.value == "absent_package"
    assert error.value.problem == "is needed for this store"
    assert error.value.remedy == "in a clone of the repository: pip install '.[redis]'"


def test_import_extra_names_option_and_alternative():
    with pytest.raises(UserError) as error:
        import_extra("absent", "x", "is needed", field="search.kind", value="faiss", instead=", or export exact")
    assert str(error.value).startswith("search.kind=faiss: is needed")
    assert error.value.remedy == "in a clone of the repository: pip install '.[x]', or export exact"


def test_import_extra_names_the_package_of_our_module(tmp_path, monkeypatch):
    (tmp_path / "needs_absent.py").write_text("import absent_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="package=absent_package"):
        import_extra("needs_absent", "serve", "is needed to serve")


def test_import_extra_reraises_internal_import_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "nestrec.absent", None)
    with pytest.raises(ImportError, match=r"nestrec\.absent"):
        import_extra("nestrec.absent", "serve", "is needed to serve")
