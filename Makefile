# make test: a virtual environment, the package with its native kernel, checks and tests. TORCH=torch==2.13.0 picks a torch.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
ROOMS = -p evrun.bench -p evrun.coordinator -p evrun.demo -p evrun.expert_worker -p evrun.kernels -p evrun.launch

SLOW = slow and not gpu and not multi_gpu

.PHONY: test again install check slow long native bench

test: check
	$(VENV)/bin/pytest -n 2 --dist loadfile

again:
	$(VENV)/bin/pytest --lf --lfnf=none $(ONLY)

install:
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	$(VENV)/bin/pip install -q '$(TORCH)'
	$(VENV)/bin/pip install -q '.[test]'

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --config-file pyproject.toml $(ROOMS)
	$(VENV)/bin/python -c "from evrun.kernels import native; assert native.probe() is None, native.probe()"

# Kernels are compiled two at a time; what has real processes runs alone.
slow: install
	failed=0; \
	$(VENV)/bin/pytest -m "$(SLOW)" -n 2 --dist loadfile tests/kernels tests/expert_worker || failed=1; \
	$(VENV)/bin/pytest -m "$(SLOW)" --ignore tests/kernels --ignore tests/expert_worker || failed=1; \
	exit $$failed

long: install
	$(VENV)/bin/pytest -m "long and not gpu"

native:
	cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release
	cmake --build build/native
	cp build/native/libevrun_native.so kernels/native/.new.so
	mv kernels/native/.new.so kernels/native/libevrun_native.so  # a new file: running processes keep the one they mapped
	cp build/native/libevrun_exchange.so expert_worker/wire/.new.so
	mv expert_worker/wire/.new.so expert_worker/wire/libevrun_exchange.so

bench: install
	$(VENV)/bin/evrun bench kernel
