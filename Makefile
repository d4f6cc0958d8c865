# Makefile - build/hadal and everything around it. No configure step.
#
#   make               the program (release)         make check   format, floors, analysis
#   make CUDA=1        the same with CUDA kernels    make fuzz    fuzz targets (clang)
#                      CUDA_ARCHS=90a: for Hopper alone, which takes a third of the time
#   make debug asan tsan   under build-debug, build-asan, build-tsan
#   make unit          the C unit tests              make bench   benchmarks
#   make install deb dist   packaging/package.mk says where to
#   make STATIC=1      libraries linked in, for machines that lack them
#   make WERROR=       warnings stay warnings, for compilers newer than ours (gcc 12, clang 14)
#
# A file's suffix selects its instruction set: x_avx2.c, x_avx512.c, x_vbmi.c, x_vnni.c, x_bf16.c; *_ref.c is compiled so
# that the reference has one answer. Everything else runs on any x86-64-v2 or aarch64.

BUILD   ?= build
ifeq ($(origin CC),default)
CC      := gcc
endif
VERSION := 0.1.0
ARCH    := $(shell $(CC) -dumpmachine | cut -d- -f1)

PACKAGES = jansson libpcre2-8 libedit libmicrohttpd gnutls hwloc libcurl zlib
# Ranks of several processes need UCX's headers here and its library when they meet
# (src/comm/ucx_library.c); `make UCX=` builds without.
UCX     ?= $(if $(STATIC),,$(shell pkg-config --exists ucx && echo ucx))
CSTD     = -std=c11 -D_POSIX_C_SOURCE=200809L -D_DEFAULT_SOURCE
WERROR  ?= -Werror
WARN     = -Wall -Wextra -Wpedantic $(WERROR) -Wshadow -Wconversion -Wsign-conversion \
           -Wdouble-promotion -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition \
           -Wundef -Wvla -Walloca -Wpointer-arith -Wcast-qual -Wcast-align -Wwrite-strings \
           -Wformat=2 -Wimplicit-fallthrough -Wframe-larger-than=16384
SAFE     = -fno-common -fvisibility=hidden -fno-math-errno -fno-trapping-math \
           -fno-strict-aliasing -fno-omit-frame-pointer
cc-option = $(shell $(CC) $1 -x c -c /dev/null -o /dev/null 2>/dev/null && echo $1)
HARDEN  := -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -fstack-protector-strong -fPIE \
           -fno-delete-null-pointer-checks -fno-strict-overflow \
           $(call cc-option,-ftrivial-auto-var-init=zero) \
           $(call cc-option,-fzero-call-used-regs=used-gpr)
ifeq ($(ARCH),x86_64)
HARDEN  += -fcf-protection=full -fstack-clash-protection
BASELINE = -march=x86-64-v2
endif
ISA_ref    = -ffp-contract=off
ISA_avx2   = -mavx2 -mfma -mf16c
ISA_avx512 = -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
ISA_vbmi   = $(ISA_avx512) -mavx512vbmi
ISA_vnni   = $(ISA_avx512) -mavx512vnni
ISA_bf16   = $(ISA_vbmi) -mavx512bf16
isa        = $(ISA_$(lastword $(subst _, ,$(basename $(notdir $1)))))
isa_flags  = $(call isa,$1) $(if $(filter -m%,$(call isa,$1)),$(KERNEL_OPT))
# The operators' locals are not zeroed first: their arrays of registers are written at once, and
# zeroing them was a tenth of a product.
UNZEROED := $(call cc-option,-ftrivial-auto-var-init=uninitialized)
# Rooms that read foreign bytes trap on an index outside its array, in release builds too.
TRAP     := $(call cc-option,-fsanitize=bounds -fsanitize-undefined-trap-on-error)
HARDEN_LD = -pie -Wl,-z,relro,-z,now,-z,noexecstack
# Frame pointers and debug information are enough for stack traces; tables for unwinding were 8 % of
# the program.
OPT     ?= -O2 -g -DNDEBUG -fno-asynchronous-unwind-tables $(HARDEN)
LDOPT   ?= $(HARDEN_LD)

PACKAGE_CFLAGS := $(shell pkg-config --cflags $(PACKAGES) $(UCX)) $(if $(UCX),-DHD_UCX)
CFLAGS  += $(CSTD) $(WARN) $(SAFE) $(BASELINE) $(OPT) -Isrc -Iinclude \
           -DHD_VERSION='"$(VERSION)"' $(PACKAGE_CFLAGS)
ifdef STATIC # but for HTTP and TLS, whose own needs are shared libraries: lay those beside
LDLIBS   = $(patsubst -l%,-l:lib%.a,$(shell pkg-config --libs-only-l jansson libpcre2-8)) \
           $(shell pkg-config --libs libedit libmicrohttpd gnutls hwloc libcurl zlib) -Wl,-rpath,'$$ORIGIN'
else
LDLIBS   = $(shell pkg-config --libs $(PACKAGES))
endif
LDLIBS  += -lm -lpthread

SOURCES := $(sort $(wildcard src/*/*.c src/*/*/*.c))
ifneq ($(ARCH),x86_64)
SOURCES := $(filter-out %_avx2.c %_avx512.c %_vbmi.c %_vnni.c %_bf16.c,$(SOURCES))
endif
OBJECTS := $(SOURCES:%.c=$(BUILD)/%.o)
LIBRARY := $(filter-out $(BUILD)/src/cli/main.o,$(OBJECTS))
TESTS   := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/*.c tests/*/*.c)))
TESTS   := $(filter-out $(BUILD)/tests/fuzz/% $(BUILD)/tests/drive/% $(BUILD)/tests/api/% $(BUILD)/tests/fakes/api_rig.o,$(TESTS))
# The handlers of the API with a call that records and an engine that says what it is told.
API_RIG := $(filter $(BUILD)/src/base/% $(BUILD)/src/tokenizer/% $(BUILD)/src/chat/% $(BUILD)/src/grammar/% $(BUILD)/src/api/% $(BUILD)/src/engine/request_ranges.o $(BUILD)/src/kv/replay_shape.o $(BUILD)/src/http/key_salt.o,$(LIBRARY)) \
           $(BUILD)/tests/fakes/api_rig.o $(BUILD)/tests/fakes/toy_tokenizer.o
DRIVERS := $(patsubst tests/drive/%.c,$(BUILD)/%,$(wildcard tests/drive/drive_*.c))
FUZZERS := $(patsubst tests/fuzz/%.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))

ifdef CUDA
NVCC      ?= $(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc)
# What kernels are compiled for, as nvcc names it: 80 also runs on 8.6 and 8.9, 100 on 10.3, 120 on
# 12.1. What is in *_sm90.cu, and training, runs on Hopper alone; 89 has instructions for FP8, and nothing
# else that matters here.
CUDA_ARCHS  ?= 80 89 90a 100 120
HOPPER_ALONE = %_sm90.cu src/ops/backward/%
FOR_FP8      = %/gemm_cuda.cu %/grouped_gemm_cuda.cu %/official_cuda.cu
without_89   = $(if $(filter 80,$(CUDA_ARCHS)),$(filter-out 89,$(CUDA_ARCHS)),$(CUDA_ARCHS))
archs_of     = $(if $(filter $(HOPPER_ALONE),$1),90a,$(if $(filter $(FOR_FP8),$1),$(CUDA_ARCHS),$(without_89)))
gencode      = $(foreach arch,$(call archs_of,$1),-gencode arch=compute_$(arch),code=sm_$(arch))
NVFLAGS    = -std=c++20 -O3 -lineinfo -Werror all-warnings -Isrc -Iinclude \
             --compress-mode=size -DHD_CUDA_ARCHS='"$(CUDA_ARCHS)"' \
             -Xcompiler -Wall,-Wextra,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-fvisibility=hidden,-fPIE
CUDA_SOURCES := $(sort $(wildcard src/*/*.cu src/*/*/*.cu))
CUDA_OBJECTS := $(CUDA_SOURCES:%.cu=$(BUILD)/%.cu.o)
OBJECTS   += $(CUDA_OBJECTS)
LIBRARY   += $(CUDA_OBJECTS)
TESTS     += $(patsubst %.cu,$(BUILD)/%.cu.o,$(wildcard tests/*/*.cu))
CFLAGS    += -DHD_CUDA
LDLIBS    += -L$(dir $(NVCC))../lib64 -lcudart_static -ldl -lrt
endif

# What is built depends on the flags as well as on files: each of these changes when its flags do.
# -Werror is none of them, since it changes no object.
FLAGS_cc   := $(CC) $(filter-out -Werror,$(CFLAGS)) $(KERNEL_OPT) OPT:$(origin OPT)
FLAGS_nvcc := $(NVCC) $(NVFLAGS)
FLAGS_link := $(CC) $(LDOPT) $(LDLIBS) $(SOURCES) $(CUDA_SOURCES)
FLAGS      := $(addprefix $(BUILD)/flags.,cc nvcc link)
$(FLAGS): $(BUILD)/flags.%: FORCE
	+@mkdir -p $(@D); now='$(subst ','\'',$(FLAGS_$*))'; \
	  [ "$$now" = "$$(cat $@ 2>/dev/null)" ] || printf '%s\n' "$$now" >$@
FORCE:

.DEFAULT_GOAL := all
# Small programs that the end-to-end tests talk to.
drivers: $(DRIVERS) $(BUILD)/examples/side_by_side
benches: $(patsubst bench/%.c,$(BUILD)/%,$(wildcard bench/bench_*.c))

.PHONY: all drivers benches unit debug asan tsan check headers fuzz bench clean FORCE
all: $(BUILD)/hadal

define link # FLAGS, LIBRARIES
	@echo "LINK $@"
	@$(CC) $(LDOPT) $1 -o $@ $(filter %.o,$^) $(LDLIBS) $2
endef

$(BUILD)/hadal: $(OBJECTS) $(BUILD)/flags.link
	$(link)

ifdef CUDA
# Kernels that spill would lose half of their speed: those outside *_sm90.cu are looked at when all are built.
$(BUILD)/hadal: $(BUILD)/stacks.checked
$(BUILD)/stacks.checked: scripts/check_spills $(CUDA_OBJECTS)
	@NVCC=$(NVCC) $^ || [ $$? = 77 ]
	@touch $@
endif

# The tests count allocations: tests/allocations.c.
comma   := ,
COUNTED := $(addprefix -Wl$(comma)--wrap=,malloc calloc realloc aligned_alloc posix_memalign)
$(BUILD)/hadal_test: $(LIBRARY) $(TESTS) $(BUILD)/flags.link
	$(call link,$(COUNTED),-lcmocka)

$(BUILD)/hadal_test_api: $(API_RIG) $(BUILD)/tests/api/test_api.o $(BUILD)/tests/api/test_kept.o \
                         $(BUILD)/tests/api/test_resume.o $(BUILD)/flags.link
	$(call link,,-lcmocka)

$(BUILD)/fuzz_api: $(BUILD)/tests/fuzz/fuzz_api.o $(API_RIG) $(BUILD)/flags.link
	$(call link,-fsanitize=fuzzer)

$(BUILD)/fuzz_disk: $(BUILD)/tests/fakes/disk_files.o
$(BUILD)/fuzz_pickle: $(BUILD)/tests/fakes/shared_device.o
$(BUILD)/fuzz_%: $(BUILD)/tests/fuzz/fuzz_%.o $(filter-out $(BUILD)/src/cli/% $(BUILD)/src/capacity/%,$(LIBRARY)) $(BUILD)/flags.link
	$(call link,-fsanitize=fuzzer)

# Its memory, its clock and its device fail on command.
FAILING := malloc calloc realloc aligned_alloc posix_memalign strdup \
           clock_gettime time hd_null_runner_interface hd_output_push hd_cache_release \
           hd_engine_submit_chat
$(BUILD)/drive_faults: WRAPPED = $(addprefix -Wl$(comma)--wrap=,$(FAILING))
# A rank that fails at a point of its work.
POINTS := hd_comm_ucx_open hd_comm_ucx_begin_anew hd_comm_ucx_interface hd_weights_open_shards \
          hd_model_step hd_model_draft
$(BUILD)/drive_ranks: WRAPPED = $(addprefix -Wl$(comma)--wrap=,$(POINTS))
# Ranks on GPUs that are none.
$(BUILD)/drive_gpus: WRAPPED = $(addprefix -Wl$(comma)--wrap=,hd_ops_open hd_device_open_cuda hd_device_count_gpus)
$(BUILD)/drive_gpus: $(BUILD)/tests/fakes/ipc_device.o
$(BUILD)/drive_%: $(BUILD)/tests/drive/drive_%.o $(LIBRARY) $(BUILD)/flags.link
	$(call link,$(WRAPPED))

$(BUILD)/bench_%: $(BUILD)/bench/bench_%.o $(LIBRARY) $(BUILD)/flags.link
	$(link)

$(BUILD)/examples/%: $(BUILD)/examples/%.o $(LIBRARY) $(BUILD)/flags.link
	$(link)

$(BUILD)/%.o: %.c Makefile $(BUILD)/flags.cc
	@mkdir -p $(@D)
	@echo "CC   $<"
	@$(CC) $(CFLAGS) $(call isa_flags,$<) -MMD -MP -c -o $@ $<

# The web page lies in the program as gzip packs it.
PAGE := $(wildcard src/server/web/*)
$(BUILD)/src/server/page.o: CFLAGS += -DPAGE_PACKED='"$(BUILD)/web/"'
$(BUILD)/src/server/page.o: $(PAGE) $(PAGE:src/server/web/%=$(BUILD)/web/%.gz)
$(BUILD)/web/%.gz: src/server/web/%
	@mkdir -p $(@D)
	@gzip -9nc $< > $@

$(BUILD)/%.cu.o: %.cu Makefile $(BUILD)/flags.nvcc
	@mkdir -p $(@D)
	@echo "NVCC $<"
	@$(NVCC) $(NVFLAGS) $(call gencode,$<) -MMD -MP -c -o $@ $< 2>$@.log; status=$$?; cat $@.log >&2; \
	  ! grep -q 'instructions are serialized' $@.log || status=1; \
	  rm -f $@.log; [ $$status = 0 ] || rm -f $@; exit $$status
# Registers that do not suffice, and products of a warpgroup that wait for each other (the compiler
# only says so), would cost these kernels half of their speed.
$(BUILD)/src/ops/%_sm90.cu.o: NVFLAGS += -Xptxas -warn-spills,-Werror

$(BUILD)/tests/%.o: CFLAGS += -Itests
$(BUILD)/tests/%.cu.o: NVFLAGS += -Itests
ifeq ($(origin OPT),file)
$(BUILD)/src/weights/%.o $(BUILD)/src/tokenizer/%.o $(BUILD)/src/chat/%.o $(BUILD)/src/grammar/%.o $(BUILD)/src/http/%.o $(BUILD)/src/hub/%.o $(BUILD)/src/api/%.o $(BUILD)/src/server/%.o: CFLAGS += $(TRAP)
$(BUILD)/src/ops/%.o: CFLAGS += $(UNZEROED)
$(BUILD)/src/client/%.o: CFLAGS += $(TRAP)
# Rooms that compute are unrolled; those that wait for people and sockets, or run once, are small.
$(BUILD)/src/ops/%.o $(BUILD)/src/tokenizer/%.o $(BUILD)/src/grammar/%.o $(BUILD)/src/moe/%.o $(BUILD)/src/base/%.o: CFLAGS += -O3
$(BUILD)/src/ops/ref/%.o: CFLAGS += -O2
SMALL = model cli capacity chat engine ops/profile runner train weights http hub pd server router client api
$(foreach room,$(SMALL),$(BUILD)/src/$(room)/%.o): CFLAGS += -Os
# The same of files that read a grammar, or that open and watch a connection.
$(addprefix $(BUILD)/src/grammar/grammar_,calls.o format.o json.o number.o opening.o parameters.o regex.o schema.o types.o): CFLAGS += -Os
$(addprefix $(BUILD)/src/comm/,address.o channel.o door.o names.o preflight.o rendezvous.o silence.o ucx.o watch.o): CFLAGS += -Os
$(addprefix $(BUILD)/src/weights/,values.o quantize.o dummy.o): CFLAGS += -O2
$(addprefix $(BUILD)/src/train/,optimizer.o init.o): CFLAGS += -O3
endif

unit: $(BUILD)/hadal_test $(BUILD)/hadal_test_api
	$(BUILD)/hadal_test
	$(BUILD)/hadal_test_api

# Sanitizers want their own objects, no fortified libc calls (they hide findings) and asserts. What
# is inlined keeps a place of its own on the stack, so that frames grow several times. Lines are all
# that reports name; variables would take a sixth of the compiler's time. Kernels live in registers:
# optimized, or most of the tests' time would be theirs; without the checks that no kernel's mistake
# needs (its reads and writes stay checked), or most of the compiler's. No fuzz target runs one.
PROGRAMS = hadal hadal_test hadal_test_api
SANITIZE = -g1 -O1 -fPIE -fno-sanitize-recover=all -Wframe-larger-than=65536
CHECKED  = -O2 -fno-sanitize=null,alignment,object-size,pointer-overflow
debug:
	$(MAKE) BUILD=build-debug OPT="-O1 -g3 -fPIE" $(PROGRAMS:%=build-debug/%)
asan:
	$(MAKE) BUILD=build-asan KERNEL_OPT="$(CHECKED)" OPT="$(SANITIZE) -fsanitize=address,undefined" \
	  LDOPT="-pie -fsanitize=address,undefined" $(PROGRAMS:%=build-asan/%) \
	  $(DRIVERS:$(BUILD)/%=build-asan/%)
tsan:
	$(MAKE) BUILD=build-tsan KERNEL_OPT="$(CHECKED)" OPT="$(SANITIZE) -fsanitize=thread" \
	  LDOPT="-pie -fsanitize=thread" $(PROGRAMS:%=build-tsan/%) \
	  $(DRIVERS:$(BUILD)/%=build-tsan/%)
fuzz:
	$(MAKE) BUILD=build-fuzz CC=clang KERNEL_OPT="-O1 -g0 -fno-sanitize=all" \
	  OPT="$(SANITIZE) -fsanitize=fuzzer-no-link,address,undefined" \
	  LDOPT="-pie -fsanitize=address,undefined" \
	  $(patsubst $(BUILD)/%,build-fuzz/%,$(FUZZERS))

bench: $(BUILD)/hadal
	bench/run

headers:
	python3 scripts/check_headers.py $(CC) $(CFLAGS)

check: headers
	python3 scripts/check_floors.py
	python3 scripts/check_names.py
	python3 scripts/check_links.py
	scripts/check_format
	scripts/analyze

include packaging/package.mk

clean:
	rm -rf build build-debug build-asan build-tsan build-fuzz build-cuda build-analyze

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
