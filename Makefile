# The two commands: `make run` and `make test`. The rest are habits.
SHELL := /bin/bash
.DEFAULT_GOAL := run
CARGO ?= cargo
BIN := $(or $(CARGO_TARGET_DIR),target)/debug
MODEL := smollm2-135m-instruct
DATA := build/data
export SPOTTER_UI_DIR := $(CURDIR)/ui/dist

.PHONY: run test test-full fmt lint ui model build bench package demo-taste help

## run: build, fetch the default model, open the app (without a display: the daemon and its URL)
run:
	scripts/setup system
	$(MAKE) --no-print-directory build
	@if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ]; then \
	  $(BIN)/spotter model pull $(MODEL) && exec $(BIN)/spotter-desktop; \
	else \
	  echo "There is no display, so this is the daemon; open the URL it prints in a browser."; \
	  exec $(BIN)/spotter serve --model $(MODEL); \
	fi

## build: the UI, the daemon, the worker and the window
build: ui
	$(CARGO) build -p spotter-cli -p spotter-worker -p spotter-desktop -p taste

ui:
	scripts/setup ui
	@if [ ! -e ui/dist/index.html ] || [ -n "$$(find ui/src ui/index.html ui/messages ui/package.json -newer ui/dist/index.html -print -quit)" ]; then \
	  cd ui && npm run --silent build; fi

## test: every test (installs what is missing)
test:
	scripts/test

## test-full: the longer tests too
test-full:
	SPOTTER_TEST_FULL=1 scripts/test

fmt:
	$(CARGO) fmt --all
	cd ui && npm run --silent format

## lint: rustfmt, clippy, svelte-check
lint: ui
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	cd ui && npm run --silent check

## bench: measure, and write BENCH.md
bench:
	scripts/bench

## package: the .deb, in build/
package:
	scripts/package

## demo-taste: teach the running Spotter a preference (PREFERENCE=brief)
PREFERENCE ?= brief
demo-taste: build
	$(BIN)/taste --preference $(PREFERENCE)

help:
	@grep -h '^## ' $(MAKEFILE_LIST) | sed 's/^## /  make /'
