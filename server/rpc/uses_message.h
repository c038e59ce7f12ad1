// What a model takes of a request (families/request_uses.h), as GetModel tells it.
#ifndef LATENTD_SERVER_RPC_USES_MESSAGE_H_
#define LATENTD_SERVER_RPC_USES_MESSAGE_H_

#include "families/request_uses.h"
#include "latentd/v1/model.pb.h"

namespace latentd {

// Sets fields, media and takes_latents.
void SetUses(const RequestUses& uses, v1::Model& model);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_USES_MESSAGE_H_
