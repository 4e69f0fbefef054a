# make run      installs prefixsim into .venv and sweeps block sizes: hit rate and TTFT in results/block_size
# make test     installs the test extra and runs ruff, mypy and pytest
# make results  makes all of results/ again, to the same bytes, in some twenty minutes; make results/pool a part.
#               What was measured elsewhere is not shipped: DATA=DIR names it, and what lacks it is left as it is
PYTHON ?= python3
BIN := .venv/bin
DATA ?=
MADE := build/results

.PHONY: run test clean results
run: results/block_size

test: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

GALLERY := fourteen_tokens block_size pool prefix_lengths ttft_under_load shared_prefix recorded_server \
           three_systems paper validation bench
.PHONY: $(GALLERY:%=results/%)
results: $(GALLERY:%=results/%)
$(GALLERY:%=results/%): .venv/.installed

results/fourteen_tokens:
	$(BIN)/prefixsim sweep scenarios/sweeps/fourteen_tokens.yaml
	$(BIN)/python -m sim.gallery fourteen_tokens

results/block_size:
	$(BIN)/prefixsim sweep scenarios/sweeps/block_size.yaml

# Of these, results/ has the tables and pictures; what else the commands leave is large.
results/pool: | $(MADE)
	$(BIN)/prefixsim mrc scenarios/pool_capacity.yaml --timed 12 --out $(MADE)/mrc
	$(BIN)/prefixsim sweep scenarios/sweeps/pool_capacity.yaml --out $(MADE)/pool_capacity
	cp $(MADE)/mrc/mrc.png $(MADE)/mrc/timed.csv $(MADE)/pool_capacity/curves.png $(MADE)/pool_capacity/curves.csv $@

results/prefix_lengths: | $(MADE)
	$(BIN)/prefixsim sweep scenarios/sweeps/prefix_length.yaml --out $(MADE)/prefix_length
	cp $(MADE)/prefix_length/curves.png $(MADE)/prefix_length/curves.csv $@

results/ttft_under_load: | $(MADE)
	$(BIN)/prefixsim sweep scenarios/sweeps/request_rate.yaml --out $(MADE)/request_rate
	cp $(MADE)/request_rate/curves.png $(MADE)/request_rate/curves.csv $@

results/shared_prefix: | $(MADE)
	$(BIN)/prefixsim run scenarios/shared_prefix.yaml --compare engine.enable_prefix_caching=true,false \
	    --out $(MADE)/shared_prefix
	cp $(MADE)/shared_prefix/compare.png $(MADE)/shared_prefix/compare.csv \
	    $(MADE)/shared_prefix/enable_prefix_caching=true/run.png $@

results/recorded_server: | $(MADE)
	$(BIN)/prefixsim calibrate --from-recording tests/measured/overload_preempt.json.gz --out $(MADE)/server.yaml
	$(BIN)/prefixsim run --set workload.kind=recording --set workload.path=tests/measured/overload_preempt.json.gz \
	    --set cost=$(MADE)/server.yaml --against tests/measured/overload_preempt.json.gz --out $(MADE)/recorded_server
	cp $(MADE)/recorded_server/against.png $(MADE)/recorded_server/against.csv $@

results/three_systems:
	$(BIN)/python -m sim.three_systems

results/paper:
	$(BIN)/python -m sim.paper

# Its exit status is 1 where a bar is missed, as some are.
results/validation:
ifneq ($(wildcard $(DATA)/traces),)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[calibrate]'
	$(BIN)/prefixsim calibrate --validate --data $(DATA) || test $$? -eq 1
else
	@echo "$@: left as it is, for it needs measurements that are not shipped: DATA=DIR, with DIR/traces"
endif

results/bench:
	$(BIN)/python -m sim.gallery bench
	@echo "$@: drawn from what was measured in one sitting; prefixsim bench --trace FILE measures this machine"

$(MADE):
	mkdir -p $@

# The stamps make a second call quick; a changed pyproject.toml installs again.
.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ .venv/.installed

$(BIN)/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find sim workloads tests -name __pycache__ -type d -prune -exec rm -rf {} +
