// The fields of a request (families/request_fields.h) in and out of latentd.v1.GenerateParams, by the table:
// nothing here names one. Pure functions; any thread.
#ifndef LATENTD_SERVER_RPC_FIELD_MESSAGES_H_
#define LATENTD_SERVER_RPC_FIELD_MESSAGES_H_

#include "absl/status/status.h"
#include "families/request_fields.h"
#include "latentd/v1/denoise.pb.h"

namespace latentd {

// Sets what the message has. Errors: INVALID_ARGUMENT INVALID_FIELD for a text that is longer than any model
// takes, and for a value that is none of an enumeration.
absl::Status ReadScalars(const v1::GenerateParams& message, RequestScalars& scalars);

// Sets in the message what is set in `scalars`. A field of a picture that the message does not have is left
// out: `strength` always has a value, an init image has not.
void WriteScalars(const RequestScalars& scalars, v1::GenerateParams& message);

// Brings `inputs` into the fields that stand for one picture of a role each (init_image, mask_image,
// control_image); what they cannot hold stays. Errors: INVALID_ARGUMENT INVALID_FIELD where both are given,
// for a role that has no name, and for what a role does not have (a mask's strength).
absl::Status FoldInputs(v1::GenerateParams& message);

// The table's role; kInit for none.
MediaRole RoleOf(v1::MediaRole role);
v1::MediaRole ToProto(MediaRole role);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_FIELD_MESSAGES_H_
