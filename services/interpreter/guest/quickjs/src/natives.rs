//! The functions that the Rust side offers to the prelude. Scripts never see them.

mod calls;
mod random;
mod text;
mod url;

pub(crate) use calls::{has_noted, note, number, parsed, string_from, utf8};

use rquickjs::{Ctx, Function, Object, Result};

/// An object with all native functions, by the names the prelude uses.
pub(crate) fn all<'js>(ctx: &Ctx<'js>) -> Result<Object<'js>> {
    let native = Object::new(ctx.clone())?;
    native.set("tool", Function::new(ctx.clone(), calls::tool)?)?;
    native.set("call", Function::new(ctx.clone(), calls::call)?)?;
    native.set("failure", Function::new(ctx.clone(), calls::failure)?)?;
    native.set("number", Function::new(ctx.clone(), calls::number)?)?;
    native.set("start", Function::new(ctx.clone(), calls::start)?)?;
    native.set("note", Function::new(ctx.clone(), calls::note)?)?;
    native.set("cancel", Function::new(ctx.clone(), calls::cancel)?)?;
    native.set("log", Function::new(ctx.clone(), calls::log)?)?;
    native.set("promiseState", Function::new(ctx.clone(), calls::promise_state)?)?;
    native.set("random", Function::new(ctx.clone(), random::random)?)?;
    native.set("fillRandom", Function::new(ctx.clone(), random::fill)?)?;
    native.set("base64Encode", Function::new(ctx.clone(), text::base64_encode)?)?;
    native.set("base64Decode", Function::new(ctx.clone(), text::base64_decode)?)?;
    native.set("utf8Encode", Function::new(ctx.clone(), text::utf8_encode)?)?;
    native.set("utf8Decode", Function::new(ctx.clone(), text::utf8_decode)?)?;
    native.set("utf8Whole", Function::new(ctx.clone(), text::utf8_whole)?)?;
    native.set("urlParse", Function::new(ctx.clone(), url::parse)?)?;
    native.set("urlSet", Function::new(ctx.clone(), url::set)?)?;
    native.set("formParse", Function::new(ctx.clone(), url::form_parse)?)?;
    native.set("formSerialize", Function::new(ctx.clone(), url::form_serialize)?)?;
    Ok(native)
}
