/* ipc_device.h - a CPU device that shares memory with other processes as a GPU does by CUDA IPC: a block
 * is a file in memory that the other process maps, at another address. Its exchanges (ops/exchange.h)
 * are loops of the host: what the kernels do, one after the other. */
#ifndef HD_TESTS_FAKES_IPC_DEVICE_H
#define HD_TESTS_FAKES_IPC_DEVICE_H

#include "device/device.h"
#include "ops/exchange.h"

hd_device *ipc_device_open(void); /* NULL: no memory */

/* Blocks of device memory that are there, of all devices, those that were released but are shared too. */
int32_t ipc_device_blocks(void);

/* Blocks of other processes that are open. */
int32_t ipc_device_opened(void);

extern const hd_exchange_ops ipc_device_exchange;

#endif
