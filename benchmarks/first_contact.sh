#!/bin/bash
# First contact with a GPU machine that may have no network: what fails first, fastest, in calls of at most 10 minutes.
#   bash benchmarks/first_contact.sh wheels     where a package index can be reached: the wheels that a machine with torch and
#                                               transformers lacks, in .whl (14 MB); copy the checkout with it to the machine
#   bash benchmarks/first_contact.sh 1          there: kernels and engine; then 2: speed; then 3: whole jobs and 7B
# Each step has its own time limit and its own log in $OUT (./out), and none stops the others. The most knowledge per minute comes first.
# Checked with Python 3.12.1, torch 2.11.0+cu130 and transformers 5.17.0; docs/gpu.md says what to do with the results.
set -u
cd "$(dirname "$0")/.."
case ${1:-} in
wheels | 1 | 2 | 3) ;;
*)
	sed -n '2,7s/^# //p' "$0"
	exit 2
	;;
esac
if [ "$1" = wheels ]; then
	set -e
	mkdir -p .whl
	platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
	for version in 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
	python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
		"${platforms[@]}" -d .whl \
		argcomplete==3.7.2 starlette==1.10.0 httptools==0.9.0 httpx==0.28.1 httpx2==2.16.2 httpcore2==2.16.2 \
		truststore==0.10.5 hydra-core==1.3.8 omegaconf==2.3.1 latex2sympy2_extended==1.11.0 math-verify==0.9.0 megatron-core==0.16.1 \
		msgspec==0.22.0 pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 pyzmq==27.3.0 \
		renderers==0.1.12 prime-pydantic-config==0.4.3 openai==3.54.0 jiter==0.19.0 distro==1.9.0 docstring-parser==0.18.0 \
		openai-harmony==0.0.8 opentelemetry-api==1.45.2 tenacity==9.2.1 uvicorn==0.54.0 annotated-doc==0.0.7 sniffio==1.3.1
	# Of these two only sources are published; they are pure Python.
	python3 -m pip wheel -q --no-deps -w .whl antlr4-python3-runtime==4.9.3 etcd3==0.12.0
	exit
fi
OUT=${OUT:-$PWD/out} SITE=${SITE:-$PWD/.site}
mkdir -p "$OUT"
[ -d "$SITE/megatron" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl || exit 3
export PYTHONPATH=$PWD:$SITE PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
step() {
	local name=$1 limit=$2 began=$SECONDS code
	shift 2
	timeout -s INT -k 15 "$limit" "$@" >"$OUT/$name.log" 2>&1
	code=$?
	echo "== $name: exit code $code after $((SECONDS - began)) s"
	tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log" | cut -c1-220
}
case $1 in
1) # what the machine is, attention kernels, the engine, and NCCL of one rank
	(nvidia-smi; free -g; df -h /dev/shm .; ls /dev/nvidia*; cat /proc/driver/nvidia/version; env | grep -iE 'cuda|nvidia|nccl') >"$OUT/machine.log" 2>&1
	step touch 60 python3 -c "import numpy; numpy.ones(6 << 30)" # 48 GB: a virtual machine may get its memory when it is touched
	step expandable 60 env PYTORCH_ALLOC_CONF=expandable_segments:True python3 -c \
		"import torch; x = torch.ones(1 << 28, device='cuda'); del x; torch.cuda.empty_cache(); torch.ones(1 << 29, device='cuda'); print('expandable ok')"
	grep -q 'expandable ok' "$OUT/expandable.log" || export PYTORCH_ALLOC_CONF=expandable_segments:False # some runtimes lack the calls
	step all_0_1_2 420 python3 -m benchmarks.gpu_all --items 0 1 2 --budget 400 --out "$OUT/a"
	;;
2) # train steps that fit 80 GB, then the generation engine
	step train_15b 200 python3 -m benchmarks.gpu_train --models 1.5b --tokens 16384 --repeats 3 --profile
	step train_05b 100 python3 -m benchmarks.gpu_train --models 0.5b --tokens 32768 --repeats 3 --profile
	step generation 120 python3 -m benchmarks.gpu_all --items 3 --budget 115 --out "$OUT/b"
	step weights15 120 python3 -m benchmarks.gpu_weights --models 1.5b --rounds 1
	;;
3) # whole jobs on one shared GPU, then numbers of 7B
	LINES_SHOWN=25 step job 330 python3 -m benchmarks.gpu_all --items 4 --budget 320 --out "$OUT/c"
	step train_7b 120 python3 -m benchmarks.gpu_train --models 7b --repeats 2
	step weights7 120 python3 -m benchmarks.gpu_weights --models 7b --rounds 1 --folder "$OUT"
	;;
esac
