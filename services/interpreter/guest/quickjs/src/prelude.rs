//! The prelude, written in JavaScript: what the guest offers scripts beyond the language itself.

use rquickjs::context::EvalOptions;
use rquickjs::{Ctx, Function, Object, Result};

/// The files in the order they run. Names begin with `construct:`; frames of these files are
/// removed from stacks.
const FILES: [(&str, &str); 10] = [
    ("construct:core.js", include_str!("prelude/core.js")),
    ("construct:format.js", include_str!("prelude/format.js")),
    ("construct:names.js", include_str!("prelude/names.js")),
    ("construct:console.js", include_str!("prelude/console.js")),
    ("construct:tools.js", include_str!("prelude/tools.js")),
    ("construct:modules.js", include_str!("prelude/modules.js")),
    ("construct:random.js", include_str!("prelude/random.js")),
    ("construct:text.js", include_str!("prelude/text.js")),
    ("construct:events.js", include_str!("prelude/events.js")),
    ("construct:url.js", include_str!("prelude/url.js")),
];

/// Runs the prelude with the native functions and returns the functions it offers to the Rust side.
pub(crate) fn load<'js>(ctx: &Ctx<'js>, native: &Object<'js>) -> Result<Object<'js>> {
    let inner = Object::new(ctx.clone())?;
    for (name, source) in FILES {
        let mut options = EvalOptions::default();
        options.filename = Some(name.to_owned());
        let file: Function = ctx.eval_with_options(source, options)?;
        file.call::<_, ()>((native.clone(), inner.clone()))?;
    }
    Ok(inner)
}
