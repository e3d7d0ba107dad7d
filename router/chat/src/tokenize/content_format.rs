//! Whether a template reads a message's content as text or as a list of parts. vLLM decides it by
//! searching the parsed template for a loop over the content. This search has vLLM's order and
//! blind spots. A template that it cannot follow gets text.

use minijinja::machinery::{ast, parse};

use super::python;

/// The form of content that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    Text,
    Parts,
}

/// Bounds the search, since aliases may be cyclic.
const NAMES_MAX: usize = 64;

/// The format that a template reads. `source` has no `generation` tags.
pub(crate) fn detect(source: &str) -> ContentFormat {
    let Ok(syntax) = python::syntax() else {
        return ContentFormat::Text;
    };
    let Ok(root) = parse(source, "chat", syntax) else {
        return ContentFormat::Text;
    };
    let mut found = TemplateNodes::default();
    found.stmt(&root, None);
    match found.loops_over_content() {
        Ok(true) => ContentFormat::Parts,
        Ok(false) | Err(Unfollowed) => ContentFormat::Text,
    }
}

/// The search met a target that is not a plain name; the engine gives up there as well.
struct Unfollowed;

/// The nodes of interest, in the order of a depth-first walk.
#[derive(Default)]
struct TemplateNodes<'t, 's> {
    assigns: Vec<(&'t ast::Expr<'s>, &'t ast::Expr<'s>)>,
    loops: Vec<LoopNode<'t, 's>>,
    macros: Vec<&'t ast::Macro<'s>>,
    calls: Vec<&'t ast::Call<'s>>,
}

struct LoopNode<'t, 's> {
    target: &'t ast::Expr<'s>,
    iter: &'t ast::Expr<'s>,
    /// Index of the innermost enclosing macro.
    in_macro: Option<usize>,
}

impl<'t, 's> TemplateNodes<'t, 's> {
    fn loops_over_content(&self) -> Result<bool, Unfollowed> {
        let messages = self.message_names()?;
        let over_content = |expr: &ast::Expr<'s>| {
            messages
                .iter()
                .any(|name| accesses(expr, name, Some("content")))
        };
        let parameters: Vec<Vec<&str>> = self
            .macros
            .iter()
            .map(|m| self.content_parameters(m, &over_content))
            .collect();
        for each in &self.loops {
            let direct = over_content(each.iter);
            let by_name = match (each.iter, each.in_macro) {
                (ast::Expr::Var(var), Some(at)) => parameters[at].contains(&var.id),
                (ast::Expr::Var(var), None) => var.id == "content",
                _ => false,
            };
            if direct || by_name {
                name_of(each.target)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// `messages` and the names assigned from it.
    fn aliases(&self) -> Result<Vec<&'s str>, Unfollowed> {
        let mut names = vec!["messages"];
        let mut next = 0;
        while let Some(&name) = names.get(next) {
            next += 1;
            for (target, value) in &self.assigns {
                if accesses(value, name, None) {
                    let target = name_of(target)?;
                    if target != name && names.len() < NAMES_MAX {
                        names.push(target);
                    }
                }
            }
        }
        Ok(names)
    }

    /// Names that stand for one message in a loop.
    fn message_names(&self) -> Result<Vec<&'s str>, Unfollowed> {
        let aliases = self.aliases()?;
        let mut names = Vec::new();
        for each in &self.loops {
            if aliases.iter().any(|name| accesses(each.iter, name, None)) {
                names.push(name_of(each.target)?);
            }
        }
        Ok(names)
    }

    /// Parameters of a macro that receive a message's content in some call.
    fn content_parameters(
        &self,
        definition: &ast::Macro<'s>,
        over_content: &impl Fn(&ast::Expr<'s>) -> bool,
    ) -> Vec<&'s str> {
        let parameters: Vec<&str> = definition
            .args
            .iter()
            .filter_map(|arg| name_of(arg).ok())
            .collect();
        let mut found = Vec::new();
        for call in &self.calls {
            if !matches!(&call.expr, ast::Expr::Var(var) if var.id == definition.name) {
                continue;
            }
            let mut position = 0;
            for arg in &call.args {
                let (parameter, expr) = match arg {
                    ast::CallArg::Pos(expr) => {
                        position += 1;
                        (parameters.get(position - 1), expr)
                    }
                    ast::CallArg::Kwarg(name, expr) => {
                        (parameters.iter().find(|parameter| *parameter == name), expr)
                    }
                    ast::CallArg::PosSplat(_) | ast::CallArg::KwargSplat(_) => continue,
                };
                found.extend(parameter.filter(|_| over_content(expr)).copied());
            }
        }
        found
    }

    fn stmts(&mut self, stmts: &'t [ast::Stmt<'s>], in_macro: Option<usize>) {
        for stmt in stmts {
            self.stmt(stmt, in_macro);
        }
    }

    fn stmt(&mut self, stmt: &'t ast::Stmt<'s>, in_macro: Option<usize>) {
        match stmt {
            ast::Stmt::Template(node) => self.stmts(&node.children, in_macro),
            ast::Stmt::EmitExpr(node) => self.expr(&node.expr),
            ast::Stmt::ForLoop(node) => {
                self.loops.push(LoopNode {
                    target: &node.target,
                    iter: &node.iter,
                    in_macro,
                });
                self.expr(&node.iter);
                self.stmts(&node.body, in_macro);
                self.stmts(&node.else_body, in_macro);
                self.exprs(node.filter_expr.iter());
            }
            ast::Stmt::IfCond(node) => {
                self.expr(&node.expr);
                self.stmts(&node.true_body, in_macro);
                self.stmts(&node.false_body, in_macro);
            }
            ast::Stmt::WithBlock(node) => {
                self.exprs(node.assignments.iter().map(|(_, value)| value));
                self.stmts(&node.body, in_macro);
            }
            ast::Stmt::Set(node) => {
                self.assigns.push((&node.target, &node.expr));
                self.expr(&node.expr);
            }
            ast::Stmt::SetBlock(node) => self.stmts(&node.body, in_macro),
            ast::Stmt::AutoEscape(node) => self.stmts(&node.body, in_macro),
            ast::Stmt::FilterBlock(node) => self.stmts(&node.body, in_macro),
            ast::Stmt::Block(node) => self.stmts(&node.body, in_macro),
            ast::Stmt::Macro(node) => self.definition(node),
            ast::Stmt::CallBlock(node) => {
                self.call(&node.call);
                self.stmts(&node.macro_decl.body, in_macro);
            }
            ast::Stmt::Do(node) => self.call(&node.call),
            ast::Stmt::EmitRaw(_)
            | ast::Stmt::Extends(_)
            | ast::Stmt::Include(_)
            | ast::Stmt::Import(_)
            | ast::Stmt::FromImport(_)
            | ast::Stmt::Continue(_)
            | ast::Stmt::Break(_) => {}
        }
    }

    fn definition(&mut self, node: &'t ast::Macro<'s>) {
        let at = self.macros.len();
        self.macros.push(node);
        self.exprs(node.defaults.iter());
        self.stmts(&node.body, Some(at));
    }

    fn call(&mut self, call: &'t ast::Call<'s>) {
        self.calls.push(call);
        self.expr(&call.expr);
        self.args(&call.args);
    }

    fn args(&mut self, args: &'t [ast::CallArg<'s>]) {
        for arg in args {
            match arg {
                ast::CallArg::Pos(expr)
                | ast::CallArg::Kwarg(_, expr)
                | ast::CallArg::PosSplat(expr)
                | ast::CallArg::KwargSplat(expr) => self.expr(expr),
            }
        }
    }

    fn exprs(&mut self, exprs: impl Iterator<Item = &'t ast::Expr<'s>>) {
        for expr in exprs {
            self.expr(expr);
        }
    }

    /// Inside expressions only calls matter.
    fn expr(&mut self, expr: &'t ast::Expr<'s>) {
        match expr {
            ast::Expr::Var(_) | ast::Expr::Const(_) => {}
            ast::Expr::Slice(node) => {
                self.expr(&node.expr);
                self.exprs([&node.start, &node.stop, &node.step].into_iter().flatten());
            }
            ast::Expr::UnaryOp(node) => self.expr(&node.expr),
            ast::Expr::BinOp(node) => self.exprs([&node.left, &node.right].into_iter()),
            ast::Expr::Compare(node) => {
                self.expr(&node.expr);
                self.exprs(node.ops.iter().map(|op| &op.expr));
            }
            ast::Expr::IfExpr(node) => {
                self.exprs([&node.test_expr, &node.true_expr].into_iter());
                self.exprs(node.false_expr.iter());
            }
            ast::Expr::Filter(node) => {
                self.exprs(node.expr.iter());
                self.args(&node.args);
            }
            ast::Expr::Test(node) => {
                self.expr(&node.expr);
                self.args(&node.args);
            }
            ast::Expr::GetAttr(node) => self.expr(&node.expr),
            ast::Expr::GetItem(node) => {
                self.exprs([&node.expr, &node.subscript_expr].into_iter());
            }
            ast::Expr::Call(node) => self.call(node),
            ast::Expr::List(node) => self.exprs(node.items.iter()),
            ast::Expr::Tuple(node) => self.exprs(node.items.iter()),
            ast::Expr::Map(node) => {
                self.exprs(node.keys.iter());
                self.exprs(node.values.iter());
            }
        }
    }
}

fn name_of<'s>(expr: &ast::Expr<'s>) -> Result<&'s str, Unfollowed> {
    if let ast::Expr::Var(var) = expr {
        Ok(var.id)
    } else {
        Err(Unfollowed)
    }
}

/// Whether an expression is the variable (or its member `key`), sliced, filtered or tested.
fn accesses(expr: &ast::Expr<'_>, name: &str, key: Option<&str>) -> bool {
    let is_name = |expr: &ast::Expr<'_>| matches!(expr, ast::Expr::Var(var) if var.id == name);
    match (expr, key) {
        (ast::Expr::Filter(node), _) => node
            .expr
            .as_ref()
            .is_some_and(|inner| accesses(inner, name, key)),
        (ast::Expr::Test(node), _) => accesses(&node.expr, name, key),
        (ast::Expr::Slice(node), _) => accesses(&node.expr, name, key),
        (ast::Expr::Var(var), None) => var.id == name,
        (ast::Expr::GetAttr(node), Some(key)) => node.name == key && is_name(&node.expr),
        (ast::Expr::GetItem(node), Some(key)) => {
            let is_key = matches!(&node.subscript_expr,
                ast::Expr::Const(constant) if constant.value.as_str() == Some(key));
            is_key && is_name(&node.expr)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
