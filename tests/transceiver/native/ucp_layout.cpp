// Compiled against the headers of the installed libucx: our declarations must describe the same memory.
#include <ucp/api/ucp.h>

#include <cstddef>

#include "ucp_api.h"

namespace kvferry::ucp {

#define SAME_FIELD(ours, theirs, our_field, their_field)                        \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field));    \
  static_assert(sizeof(ours::our_field) == sizeof(((theirs*)nullptr)->their_field))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))

static_assert(sizeof(Status) == sizeof(ucs_status_t));
SAME_VALUE(kOk, UCS_OK);
SAME_VALUE(kInProgress, UCS_INPROGRESS);
SAME_VALUE(kLastError, UCS_ERR_LAST);
static_assert(kMajor == UCP_API_MAJOR && kOldestMinor <= UCP_API_MINOR);

static_assert(sizeof(Params) <= sizeof(ucp_params_t));
SAME_FIELD(Params, ucp_params_t, field_mask, field_mask);
SAME_FIELD(Params, ucp_params_t, features, features);
SAME_VALUE(Params::kFeatures, UCP_PARAM_FIELD_FEATURES);
SAME_VALUE(Params::kRemoteMemory, UCP_FEATURE_RMA);
SAME_VALUE(Params::kActiveMessages, UCP_FEATURE_AM);

static_assert(sizeof(WorkerParams) <= sizeof(ucp_worker_params_t));
SAME_FIELD(WorkerParams, ucp_worker_params_t, field_mask, field_mask);
SAME_FIELD(WorkerParams, ucp_worker_params_t, thread_mode, thread_mode);
SAME_VALUE(WorkerParams::kThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME_VALUE(WorkerParams::kSerialized, UCS_THREAD_MODE_SERIALIZED);

// The library writes into this one: it must not be smaller than what its mask asks for.
static_assert(sizeof(WorkerAttributes) >= sizeof(ucp_worker_attr_t));
SAME_FIELD(WorkerAttributes, ucp_worker_attr_t, field_mask, field_mask);
SAME_FIELD(WorkerAttributes, ucp_worker_attr_t, address, address);
SAME_FIELD(WorkerAttributes, ucp_worker_attr_t, address_nbytes, address_length);
SAME_VALUE(WorkerAttributes::kAddress, UCP_WORKER_ATTR_FIELD_ADDRESS);

static_assert(sizeof(EndpointParams) <= sizeof(ucp_ep_params_t));
SAME_FIELD(EndpointParams, ucp_ep_params_t, field_mask, field_mask);
SAME_FIELD(EndpointParams, ucp_ep_params_t, address, address);
SAME_FIELD(EndpointParams, ucp_ep_params_t, error_mode, err_mode);
SAME_FIELD(EndpointParams, ucp_ep_params_t, error_handler.callback, err_handler.cb);
SAME_FIELD(EndpointParams, ucp_ep_params_t, error_handler.argument, err_handler.arg);
SAME_VALUE(EndpointParams::kAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME_VALUE(EndpointParams::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME_VALUE(EndpointParams::kErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME_VALUE(EndpointParams::kPeer, UCP_ERR_HANDLING_MODE_PEER);

static_assert(sizeof(MapParams) <= sizeof(ucp_mem_map_params_t));
SAME_FIELD(MapParams, ucp_mem_map_params_t, field_mask, field_mask);
SAME_FIELD(MapParams, ucp_mem_map_params_t, address, address);
SAME_FIELD(MapParams, ucp_mem_map_params_t, nbytes, length);
SAME_VALUE(MapParams::kAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME_VALUE(MapParams::kNbytes, UCP_MEM_MAP_PARAM_FIELD_LENGTH);

static_assert(sizeof(RequestParams) <= sizeof(ucp_request_param_t));
SAME_FIELD(RequestParams, ucp_request_param_t, op_attr_mask, op_attr_mask);
SAME_FIELD(RequestParams, ucp_request_param_t, flags, flags);
SAME_FIELD(RequestParams, ucp_request_param_t, callback, cb);
SAME_FIELD(RequestParams, ucp_request_param_t, user_data, user_data);
SAME_FIELD(RequestParams, ucp_request_param_t, memory, memh);
SAME_VALUE(RequestParams::kCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME_VALUE(RequestParams::kUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME_VALUE(RequestParams::kFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME_VALUE(RequestParams::kMemory, UCP_OP_ATTR_FIELD_MEMH);
SAME_VALUE(RequestParams::kForceClose, UCP_EP_CLOSE_FLAG_FORCE);
SAME_VALUE(RequestParams::kEager, UCP_AM_SEND_FLAG_EAGER);
SAME_VALUE(RequestParams::kCopyHeader, UCP_AM_SEND_FLAG_COPY_HEADER);

static_assert(sizeof(MessageHandlerParams) <= sizeof(ucp_am_handler_param_t));
SAME_FIELD(MessageHandlerParams, ucp_am_handler_param_t, field_mask, field_mask);
SAME_FIELD(MessageHandlerParams, ucp_am_handler_param_t, id, id);
SAME_FIELD(MessageHandlerParams, ucp_am_handler_param_t, flags, flags);
SAME_FIELD(MessageHandlerParams, ucp_am_handler_param_t, callback, cb);
SAME_FIELD(MessageHandlerParams, ucp_am_handler_param_t, argument, arg);
SAME_VALUE(MessageHandlerParams::kId, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME_VALUE(MessageHandlerParams::kFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME_VALUE(MessageHandlerParams::kCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME_VALUE(MessageHandlerParams::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME_VALUE(MessageHandlerParams::kWholeMessage, UCP_AM_FLAG_WHOLE_MSG);
SAME_VALUE(MessageHandlerParams::kRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);
static_assert(offsetof(ucp_am_recv_param, recv_attr) == 0);

}  // namespace kvferry::ucp
