#include "server/events.h"

namespace holdfast {

template class OneOf<AnyAdminQuery>;
template class OneOf<AnyAdminResult>;
template class OneOf<AnyEvent>;
template class OneOf<AnyAction>;

}  // namespace holdfast
